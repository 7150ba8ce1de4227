"""Measure: a running server, the engine alone, or the parts that compute nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from hardpoint import env
from hardpoint.cli import bench_engine, bench_parts, console
from hardpoint.cli.bench_flags import Kind, count, prompt_arguments, prompt_settings
from hardpoint.config.arguments import Parser
from hardpoint.config.quantities import between


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


def _declare_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="of that server (default: HARDPOINT_API_KEY)")
    parser.add_argument("--model", metavar="NAME", help="a name that it serves (default: it is asked)")
    count(parser, "--num-requests", 64, "requests that count")
    count(parser, "--warmup", 2, "requests before them", lowest=0)
    count(parser, "--concurrency", 16, "requests under way at once")
    parser.add_argument(
        "--rate",
        type=between(1e-3, 1e6),
        metavar="R",
        help="requests per second at random moments, instead of --concurrency",
    )
    parser.add_argument("--temperature", type=between(0.0, 2.0), default=0.0, help="(default: %(default)s)")
    parser.add_argument("--timeout", type=between(0.1, 86400.0), default=600.0, help="seconds per request (600)")
    parser.add_argument("--histogram", action="store_true", help="draw the distributions of TTFT and TPOT")
    prompt_arguments(parser, input_len=128, output_len=64)


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


KINDS: dict[str, Kind] = {
    "serve": ("a running server under load: TTFT, TPOT, ITL, throughput", _declare_serve, _serve),
    **bench_engine.KINDS,
    **bench_parts.KINDS,
}
