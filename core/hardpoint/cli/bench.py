"""Measure: a running server, the engine alone, or the parts that compute nothing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint import env
from hardpoint.cli import console
from hardpoint.cli.model_name import DEFAULT_MODEL
from hardpoint.config.arguments import ENGINE_SECTIONS, Parser, add_sections, engine_config
from hardpoint.config.quantities import at_least, between

if TYPE_CHECKING:
    from hardpoint.bench.datasets import PromptSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the measurements, each with its own flags."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=Parser)
    for name, (summary, declare, measure) in KINDS.items():
        kind = kinds.add_parser(name, help=summary, description=summary)
        declare(kind)
        kind.add_argument("--json", action="store_true", help="results as JSON")
        kind.set_defaults(measure=measure)


def execute(args: argparse.Namespace) -> int:
    """Run the chosen measurement."""
    measure: Callable[[argparse.Namespace], int] = args.measure
    return measure(args)


def _count(parser: argparse.ArgumentParser, flag: str, default: int, text: str, *, lowest: int = 1) -> None:
    parser.add_argument(flag, type=at_least(lowest), default=default, metavar="N", help=f"{text} (default: {default})")


def _prompt_arguments(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    group = parser.add_argument_group("Prompts")
    group.add_argument("--input-len", type=at_least(1), default=input_len, metavar="TOKENS", help="of each prompt")
    group.add_argument("--output-len", type=at_least(1), default=output_len, metavar="TOKENS", help="made for each")
    group.add_argument("--shared-prefix", type=at_least(0), default=0, metavar="TOKENS", help="that all prompts share")
    group.add_argument("--spread", type=between(0.0, 1.0), default=0.0, help="of lengths, as a share of --input-len")
    group.add_argument("--prompts", type=Path, metavar="FILE", help='a text per line, or JSON lines with a "prompt"')
    group.add_argument("--vocab-size", type=at_least(300), default=16_000, metavar="N", help="random ids are below it")
    group.add_argument("--prompt-seed", type=int, default=0, help="same seed, same prompts")


def prompt_settings(args: argparse.Namespace) -> PromptSettings:
    """From these flags."""
    from hardpoint.bench.datasets import PromptSettings

    return PromptSettings(
        args.input_len, args.shared_prefix, args.spread, args.vocab_size, args.prompt_seed, args.prompts
    )


def _declare_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="of that server (default: HARDPOINT_API_KEY)")
    parser.add_argument("--model", metavar="NAME", help="a name that it serves (default: it is asked)")
    _count(parser, "--num-requests", 64, "requests that count")
    _count(parser, "--warmup", 2, "requests before them", lowest=0)
    _count(parser, "--concurrency", 16, "requests under way at once")
    parser.add_argument(
        "--rate",
        type=between(1e-3, 1e6),
        metavar="R",
        help="requests per second at random moments, instead of --concurrency",
    )
    parser.add_argument("--temperature", type=between(0.0, 2.0), default=0.0, help="(default: %(default)s)")
    parser.add_argument("--timeout", type=between(0.1, 86400.0), default=600.0, help="seconds per request (600)")
    parser.add_argument("--histogram", action="store_true", help="draw the distributions of TTFT and TPOT")
    _prompt_arguments(parser, input_len=128, output_len=64)


def _serve(args: argparse.Namespace) -> int:
    from hardpoint.bench.load import Target
    from hardpoint.bench.report import histogram, report, summarize
    from hardpoint.bench.serving import ServingSettings, run

    settings = ServingSettings(
        target=Target.parse(args.url, args.api_key or env.API_KEY.read()),
        model=args.model,
        requests=args.num_requests,
        warmup=args.warmup,
        concurrency=args.concurrency,
        rate=args.rate,
        output_len=args.output_len,
        prompts=prompt_settings(args),
        temperature=args.temperature,
        timeout=args.timeout,
    )
    line, done = console.ProgressLine(), [0]

    def count() -> None:
        done[0] += 1
        line.update(f"{done[0]} of {settings.requests} requests", done[0] / settings.requests)

    try:
        records = run(settings, count)
    finally:
        line.clear()
    summary = summarize(records)
    if args.json:
        print(json.dumps(summary.as_json()))
        return 1 if summary.failed else 0
    print(report(summary))
    if args.histogram:
        good = [record for record in records if record.error is None and record.events]
        print("\n" + histogram([record.events[0] - record.start for record in good], title="TTFT"))
        pace = [(r.events[-1] - r.events[0]) / (r.output_tokens - 1) for r in good if r.output_tokens > 1]
        print("\n" + histogram(pace, title="TPOT"))
    return 1 if summary.failed else 0


def _declare_offline(parser: argparse.ArgumentParser, *, requests: int, text: str) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="(default: %(default)s)")
    _count(parser, "--num-requests", requests, text)
    _prompt_arguments(parser, input_len=128, output_len=64)
    add_sections(parser, ENGINE_SECTIONS)


def _declare_throughput(parser: argparse.ArgumentParser) -> None:
    _declare_offline(parser, requests=32, text="requests, all there at the start")


def _declare_latency(parser: argparse.ArgumentParser) -> None:
    _declare_offline(parser, requests=1, text="requests in a batch")
    _count(parser, "--rounds", 5, "batches timed")


def _throughput(args: argparse.Namespace) -> int:
    from hardpoint.bench.datasets import prompts
    from hardpoint.bench.offline import throughput

    llm = offline_engine(args)
    texts = prompts(prompt_settings(args), args.num_requests + 1)
    throughput(llm, texts[:1], 2)
    result = throughput(llm, texts[1:], args.output_len)
    found = dataclasses.asdict(result) | {"output_rate": result.output_rate, "total_rate": result.total_rate}
    return _show(
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
    return _show(
        args,
        found,
        f"batch of {result.batch}, {args.input_len} tokens in, {result.output_len} out, {args.rounds} rounds\n"
        f"whole        {1e3 * result.whole.median:,.1f} ms (median)\n"
        f"first token  {1e3 * result.first_token.median:,.1f} ms\n"
        f"then         {1e3 * result.per_token:,.2f} ms per step, {result.decode_rate:,.1f} tok/s",
    )


def _declare_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=at_least(1), nargs="+", default=[64, 256], metavar="N", help="at once")
    _count(parser, "--steps", 600, "steps measured")


def _step(args: argparse.Namespace) -> int:
    from hardpoint.bench.step import run

    results = [run(requests, steps=args.steps) for requests in args.requests]
    lines = [f"{'requests':>8}{'tokens/step':>13}{'schedule':>10}{'update':>10}{'median':>10}{'p99':>10}   ms per step"]
    lines += [
        f"{r.requests:>8}{r.tokens_per_step:>13.1f}{r.schedule.median:>10.3f}{r.update.median:>10.3f}"
        f"{r.total.median:>10.3f}{r.total.p99:>10.3f}"
        for r in results
    ]
    return _show(args, [dataclasses.asdict(result) for result in results], "\n".join(lines))


def _declare_stream(parser: argparse.ArgumentParser) -> None:
    _count(parser, "--num-requests", 256, "requests")
    _count(parser, "--concurrency", 32, "requests under way at once")
    _count(parser, "--input-len", 32, "tokens of each prompt")
    _count(parser, "--output-len", 128, "tokens streamed per request")
    parser.add_argument("--tokenizer", metavar="MODEL", help="a model whose tokenizer is used, instead of a tiny one")


def _stream(args: argparse.Namespace) -> int:
    from hardpoint.bench.streaming import GOAL, run

    result = run(args.num_requests, args.concurrency, args.input_len, args.output_len, args.tokenizer)
    summary = result.summary
    found = {
        "tokens_per_core_second": result.tokens_per_core_second,
        "goal": GOAL,
        "goal_met": result.goal_met,
        "pieces": result.pieces,
        "front_end_seconds": result.front_end_seconds,
        "engine_seconds": result.engine_seconds,
        "clients": summary.as_json(),
    }
    verdict = "met" if result.goal_met else "missed"
    return _show(
        args,
        found,
        f"{summary.output_tokens:,} tokens streamed in {result.pieces:,} pieces and {summary.duration:.2f} s: "
        f"{summary.output_rate:,.0f} tok/s\n"
        f"processor time: front end {result.front_end_seconds:.2f} s, engine {result.engine_seconds:.2f} s\n"
        f"{result.tokens_per_core_second:,.0f} tokens per second of one core (goal: {GOAL:,.0f}, {verdict})",
    )


def _declare_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=at_least(1), nargs="+", default=[1, 16], metavar="N", help="(1 16)")
    _count(parser, "--rounds", 3, "interleaved rounds")
    _prompt_arguments(parser, input_len=32, output_len=96)
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
    return _show(args, found, "\n".join(lines))


def _counts(parser: argparse.ArgumentParser, flag: str, default: list[int], text: str) -> None:
    shown = " ".join(map(str, default))
    parser.add_argument(
        flag, type=at_least(1), nargs="+", default=default, metavar="N", help=f"{text} (default: {shown})"
    )


def _declare_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="(default: %(default)s)")
    _counts(parser, "--tokens", [1, 8, 32, 128, 512], "tokens of a step: up to 32 decodes, above that one prompt")
    _counts(parser, "--context", [128, 1024], "cached tokens behind each decode")
    _count(parser, "--rounds", 5, "steps timed of each shape")
    add_sections(parser, ENGINE_SECTIONS)


def _kernels(args: argparse.Namespace) -> int:
    from hardpoint.bench import kernels_report as shown
    from hardpoint.bench.kernels import run

    line = console.ProgressLine()
    try:
        report = run(
            engine_config(args, args.model),
            args.tokens,
            args.context,
            args.rounds,
            on_shape=lambda shape, done: line.update(f"step {shape}", done),
        )
    finally:
        line.clear()
    if args.json:
        return _show(args, shown.as_json(report), "")
    print(shown.heading(report))
    console.show_table(shown.HEADERS, shown.rows(report), styles=shown.styles(report), right=shown.RIGHT)
    return _show(args, None, shown.footing(report))


def _declare_overhead(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="(default: %(default)s)")
    _counts(parser, "--requests", [1, 32], "decodes running at once")
    _count(parser, "--steps", 100, "steps timed")
    _count(parser, "--input-len", 32, "tokens of each prompt")
    add_sections(parser, ENGINE_SECTIONS)


def _overhead(args: argparse.Namespace) -> int:
    from hardpoint.bench.overhead import PARTS, run

    results = run(engine_config(args, args.model), args.requests, steps=args.steps, input_len=args.input_len)
    lines = [f"{'requests':>8}" + "".join(f"{part:>10}" for part in (*PARTS, "besides")) + "   ms per step, medians"]
    for result in results:
        cells = (*(result.parts[part] for part in PARTS), result.besides)
        verdict = "" if result.goal is None else f"   goal: {result.goal:g}, {'met' if result.goal_met else 'missed'}"
        lines.append(f"{result.requests:>8}" + "".join(f"{cell:>10.3f}" for cell in cells) + verdict)
    lines.append("besides: all but the device's step; the parts run one after another here, overlapped when serving")
    found = [dataclasses.asdict(result) | {"goal": result.goal, "goal_met": result.goal_met} for result in results]
    return _show(args, found, "\n".join(lines))


def offline_engine(args: argparse.Namespace) -> Any:
    """The offline interface with the settings of the command line."""
    from hardpoint.llm import LLM

    return LLM.from_config(engine_config(args, args.model))


def fresh_batches(args: argparse.Namespace) -> Callable[[int], list[Any]]:
    """Makes batches of prompts that have not been used before, so that no cache holds them."""
    from hardpoint.bench.datasets import prompts

    settings, used = prompt_settings(args), [0]

    def batch(size: int) -> list[Any]:
        used[0] += 1
        return prompts(dataclasses.replace(settings, seed=settings.seed + used[0]), size)

    return batch


def _show(args: argparse.Namespace, found: Any, text: str) -> int:
    print(json.dumps(found) if args.json else text)
    sys.stdout.flush()
    return 0


Kind = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
KINDS: dict[str, Kind] = {
    "serve": ("a running server under load: TTFT, TPOT, ITL, throughput", _declare_serve, _serve),
    "throughput": ("the engine in this process, many requests at once", _declare_throughput, _throughput),
    "latency": ("the engine in this process, one batch at a time", _declare_latency, _latency),
    "step": ("scheduler and pager alone: milliseconds per step", _declare_step, _step),
    "overhead": ("the engine besides the device, in milliseconds per step", _declare_overhead, _overhead),
    "kernels": ("GB/s and GMAC/s of each op, beside the machine's ceilings", _declare_kernels, _kernels),
    "stream": ("front end and engine without a model: streamed tokens per core", _declare_stream, _stream),
    "compare-transformers": ("beside transformers' generate in float32, interleaved", _declare_compare, _compare),
}
