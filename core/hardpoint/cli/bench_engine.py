"""`hardpoint bench` on the engine in this process, alone and beside others."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from hardpoint.cli import console
from hardpoint.cli.bench_flags import (
    Kind,
    count,
    fresh_batches,
    offline_engine,
    prompt_arguments,
    prompt_settings,
    show,
)
from hardpoint.cli.model_name import DEFAULT_MODEL
from hardpoint.config.arguments import ENGINE_SECTIONS, add_sections, engine_config
from hardpoint.config.quantities import at_least
from hardpoint.errors import ConfigError


def _declare_offline(parser: argparse.ArgumentParser, *, requests: int, text: str) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="(default: %(default)s)")
    count(parser, "--num-requests", requests, text)
    prompt_arguments(parser, input_len=128, output_len=64)
    add_sections(parser, ENGINE_SECTIONS)


def _declare_throughput(parser: argparse.ArgumentParser) -> None:
    _declare_offline(parser, requests=32, text="requests, all there at the start")


def _declare_latency(parser: argparse.ArgumentParser) -> None:
    _declare_offline(parser, requests=1, text="requests in a batch")
    count(parser, "--rounds", 5, "batches timed")


def _throughput(args: argparse.Namespace) -> int:
    from hardpoint.bench.datasets import prompts
    from hardpoint.bench.offline import throughput

    llm = offline_engine(args)
    texts = prompts(prompt_settings(args), args.num_requests + 1)
    throughput(llm, texts[:1], 2)
    result = throughput(llm, texts[1:], args.output_len)
    found = dataclasses.asdict(result) | {"output_rate": result.output_rate, "total_rate": result.total_rate}
    return show(
        args,
        found,
        f"{result.requests} requests, {result.prompt_tokens:,} tokens in, {result.output_tokens:,} out, "
        f"{result.seconds:.2f} s\n"
        f"{result.output_rate:,.1f} output tok/s, {result.total_rate:,.1f} tok/s in all",
    )


def _latency(args: argparse.Namespace) -> int:
    from hardpoint.bench.offline import latency

    llm = offline_engine(args)
    batches = fresh_batches(args)
    result = latency(llm, lambda: batches(args.num_requests), args.output_len, args.rounds)
    found = dataclasses.asdict(result) | {"per_token": result.per_token, "decode_rate": result.decode_rate}
    return show(
        args,
        found,
        f"batch of {result.batch}, {args.input_len} tokens in, {result.output_len} out, {args.rounds} rounds\n"
        f"whole        {1e3 * result.whole.median:,.1f} ms (median)\n"
        f"first token  {1e3 * result.first_token.median:,.1f} ms\n"
        f"then         {1e3 * result.per_token:,.2f} ms per step, {result.decode_rate:,.1f} tok/s",
    )


def _declare_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=at_least(1), nargs="+", default=[1, 16], metavar="N", help="(1 16)")
    count(parser, "--rounds", 3, "interleaved rounds")
    prompt_arguments(parser, input_len=32, output_len=96)
    add_sections(parser, ENGINE_SECTIONS)


def _compare(args: argparse.Namespace) -> int:
    import torch

    from hardpoint.bench.transformers_peer import TransformersPeer, compare

    config = engine_config(args, args.model)
    # Before the device is opened: beside a pool of its own it leaves torch fewer.
    threads = config.device.threads or config.device.options.get("threads") or torch.get_num_threads()
    peer = TransformersPeer(config.model)
    llm = offline_engine(args)
    batches = fresh_batches(args)
    results = compare(
        llm,
        peer,
        batches,
        output_len=args.output_len,
        concurrencies=args.concurrency,
        rounds=args.rounds,
        threads=threads,
        on_round=console.note,
    )
    lines = [f"{'at once':>8}{'ours':>10}{'theirs':>10}{'ratio':>8}   output tok/s, medians of {args.rounds}"]
    found = []
    for result in results:
        ours, theirs = sorted(result.ours)[len(result.ours) // 2], sorted(result.theirs)[len(result.theirs) // 2]
        lines.append(f"{result.concurrency:>8}{ours:>10.1f}{theirs:>10.1f}{result.ratio:>8.2f}")
        found.append(dataclasses.asdict(result) | {"ratio": result.ratio})
    return show(args, found, "\n".join(lines))


def _declare_engines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder with config.json; --load-format dummy needs no more")
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", help="a b c d, and sN for N requests (default: a b c d s8 ... s512)"
    )
    parser.add_argument(
        "--against", nargs="*", metavar="ENGINE", help="vllm, sglang (default: those installed here; none: ours alone)"
    )
    count(parser, "--rounds", 3, "rounds that count, in turns, after one that does not")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="compare.json, compare.md, and compare.png if --plot"
    )
    parser.add_argument("--plot", action="store_true", help="draw a picture too")
    add_sections(parser, ENGINE_SECTIONS)


def _engines(args: argparse.Namespace) -> int:
    from hardpoint.bench import compare, contestants
    from hardpoint.bench.workloads import USUAL
    from hardpoint.charts import need_matplotlib
    from hardpoint.weights.store import resolve

    against = contestants.importable() if args.against is None else args.against
    unknown = [name for name in against if name not in contestants.OTHERS]
    if unknown:
        raise ConfigError(f"--against {unknown[0]}: known are {', '.join(contestants.OTHERS)}")
    if args.plot:
        need_matplotlib()  # rather missed now than after the measurement
    config = engine_config(args, args.model)
    vocabulary = compare.vocabulary_of(config.model)
    names = ["hardpoint", *against]
    memory = 0.9 / len(names)
    limit, budget = config.model.max_model_len or 4096, config.scheduler.max_batch_tokens or 8192
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, model=str(resolve(config.model.model)), max_model_len=limit),
        cache=dataclasses.replace(config.cache, prefix_caching=False, memory_fraction=memory),
        scheduler=dataclasses.replace(config.scheduler, max_batch_tokens=budget),
    )
    setup = contestants.Setup(config, memory)
    workloads = args.workloads or USUAL
    entries = compare.compare(names, setup, workloads, vocabulary, rounds=args.rounds, on_round=console.note)
    found = compare.rows(entries, vocabulary, limit)
    lines = compare.table(entries, found)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        compare.write_json(args.out / "compare.json", setup, entries, found)
        (args.out / "compare.md").write_text("\n".join(lines) + "\n")
        if args.plot:
            compare.draw(args.out / "compare.png", entries, found)
    return show(args, [vars(row) for row in found], "\n".join(lines))


KINDS: dict[str, Kind] = {
    "throughput": ("the engine in this process, many requests at once", _declare_throughput, _throughput),
    "latency": ("the engine in this process, one batch at a time", _declare_latency, _latency),
    "compare": ("beside vLLM and SGLang where installed: seeded workloads, in turns", _declare_engines, _engines),
    "compare-transformers": ("beside transformers' generate in float32, interleaved", _declare_compare, _compare),
}
