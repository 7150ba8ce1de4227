"""`hardpoint bench` on parts: scheduler, front end, kernels, and what a step's time goes into."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from hardpoint.cli import console
from hardpoint.cli.bench_flags import Kind, count, counts, show
from hardpoint.cli.model_name import DEFAULT_MODEL
from hardpoint.config.arguments import ENGINE_SECTIONS, add_sections, engine_config
from hardpoint.config.quantities import at_least


def _declare_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=at_least(1), nargs="+", default=[64, 256], metavar="N", help="at once")
    count(parser, "--steps", 600, "steps measured")


def _step(args: argparse.Namespace) -> int:
    from hardpoint.bench.step import run

    results = [run(requests, steps=args.steps) for requests in args.requests]
    lines = [f"{'requests':>8}{'tokens/step':>13}{'schedule':>10}{'update':>10}{'median':>10}{'p99':>10}   ms per step"]
    lines += [
        f"{r.requests:>8}{r.tokens_per_step:>13.1f}{r.schedule.median:>10.3f}{r.update.median:>10.3f}"
        f"{r.total.median:>10.3f}{r.total.p99:>10.3f}"
        for r in results
    ]
    return show(args, [dataclasses.asdict(result) for result in results], "\n".join(lines))


def _declare_stream(parser: argparse.ArgumentParser) -> None:
    count(parser, "--num-requests", 256, "requests")
    count(parser, "--concurrency", 32, "requests under way at once")
    count(parser, "--input-len", 32, "tokens of each prompt")
    count(parser, "--output-len", 128, "tokens streamed per request")
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
    return show(
        args,
        found,
        f"{summary.output_tokens:,} tokens streamed in {result.pieces:,} pieces and {summary.duration:.2f} s: "
        f"{summary.output_rate:,.0f} tok/s\n"
        f"processor time: front end {result.front_end_seconds:.2f} s, engine {result.engine_seconds:.2f} s\n"
        f"{result.tokens_per_core_second:,.0f} tokens per second of one core (goal: {GOAL:,.0f}, {verdict})",
    )


def _declare_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="(default: %(default)s)")
    counts(parser, "--tokens", [1, 8, 32, 128, 512], "tokens of a step: up to 32 decodes, above that one prompt")
    counts(parser, "--context", [128, 1024], "cached tokens behind each decode")
    count(parser, "--rounds", 5, "steps timed of each shape")
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
        return show(args, shown.as_json(report), "")
    print(shown.heading(report))
    console.show_table(shown.HEADERS, shown.rows(report), styles=shown.styles(report), right=shown.RIGHT)
    return show(args, None, shown.footing(report))


def _declare_overhead(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="(default: %(default)s)")
    counts(parser, "--requests", [1, 32], "decodes running at once")
    count(parser, "--steps", 100, "steps timed")
    count(parser, "--input-len", 32, "tokens of each prompt")
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
    return show(args, found, "\n".join(lines))


def _declare_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="(default: %(default)s)")
    count(parser, "--num-requests", 8, "requests that decode at once")
    count(parser, "--input-len", 128, "tokens of each prompt")
    count(parser, "--steps", 40, "steps looked at")
    count(parser, "--top", 15, "kernels shown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of three steps: kernels and gaps")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the profiler's trace, for chrome://tracing")
    add_sections(parser, ENGINE_SECTIONS)


def _profile(args: argparse.Namespace) -> int:
    from hardpoint.bench import profile
    from hardpoint.charts import need_matplotlib

    if args.plot:
        need_matplotlib()  # rather missed now than after the measurement
    found = profile.profile(
        engine_config(args, args.model), args.num_requests, input_len=args.input_len, steps=args.steps, trace=args.trace
    )
    if args.plot:
        profile.draw(args.plot, found)
    plain = {"device": found.device, "requests": found.requests, "step": found.step, "idle": found.idle}
    plain |= {"hand_over": found.hand_over, "by_kernels": found.by_kernels}
    plain |= {"work": [dataclasses.asdict(work) for work in found.work()]}
    return show(args, plain, "\n".join(profile.lines(found, args.top)))


KINDS: dict[str, Kind] = {
    "step": ("scheduler and pager alone: milliseconds per step", _declare_step, _step),
    "overhead": ("the engine besides the device, in milliseconds per step", _declare_overhead, _overhead),
    "kernels": ("GB/s and GMAC/s of each op, beside the machine's ceilings", _declare_kernels, _kernels),
    "profile": (
        "what the device does in decode steps, and its gaps, as a table and a picture",
        _declare_profile,
        _profile,
    ),
    "stream": ("front end and engine without a model: streamed tokens per core", _declare_stream, _stream),
}
