"""How a deployment would serve your traffic: the real scheduler and pager on simulated chips, on a virtual clock.

  hardpoint simulate llama-3.1-70b --hardware h200-sxm --tp 8 --replicas 16 --rate 40 --duration 10m
  hardpoint simulate llama-3.1-70b --hardware h200-sxm --tp 8 --rate 40 --duration 10m \\
      --find-replicas --slo "ttft_p95<0.5,tpot_p95<0.03"

A trace is a CSV of arrival seconds, prompt tokens, output tokens and optionally a prefix id.
docs/how-to/size-a-deployment.md explains the numbers and how far they can be trusted.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.cli import console
from hardpoint.config.quantities import at_least, between, token_count
from hardpoint.errors import ConfigError

if TYPE_CHECKING:
    from hardpoint.simulate.fleet import Deployment, Outcome
    from hardpoint.simulate.summary import Summary
    from hardpoint.simulate.traffic import Traffic

_WEIGHTS = ("auto", "float32", "bfloat16", "float16", "float8", "int8", "int4")
_KV = ("auto", "float32", "bfloat16", "float16", "float8", "int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint simulate`."""
    parser.add_argument("model", nargs="?", metavar="MODEL_CONFIG", help="config.json, folder, model or named shape")
    parser.add_argument("--list", action="store_true", help="show the hardware table and the named shapes, and end")
    _declare_deployment(parser.add_argument_group("Deployment"))
    _declare_traffic(parser.add_argument_group("Traffic"))
    group = parser.add_argument_group("Question and answer")
    group.add_argument("--find-replicas", action="store_true", help="fewest replicas that meet --slo")
    group.add_argument("--slo", metavar="TERMS", help='such as "ttft_p95<0.5,tpot_p95<0.03", in seconds')
    group.add_argument("--max-replicas", type=at_least(1), default=256, metavar="N", help="tried at most (256)")
    group.add_argument("--json", action="store_true", help="results as JSON")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="charts; needs pip install hardpoint[plot]")
    group.add_argument("--html", type=Path, metavar="FILE.html", help="a report in one file")


def _declare_deployment(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--hardware", default="h100-sxm", metavar="NAME", help="row of the table, or FILE.json:ROW (%(default)s)")
    add("--step-times", type=Path, metavar="FILE.csv", help="recorded step times instead of the cost model")
    add("--tp", type=at_least(1), default=1, metavar="N", help="chips of a replica, tensor parallel (1)")
    add("--replicas", type=at_least(1), default=1, metavar="N", help="(1)")
    add("--routing", choices=("round-robin", "least-loaded"), default="round-robin", help="(%(default)s)")
    add("--weights", choices=_WEIGHTS, default="auto", help="how weights are kept; auto: as the config says")
    add("--kv-dtype", choices=_KV, default="auto", help="of the KV cache; auto: as activations")
    add("--memory-fraction", type=between(0.01, 1.0), default=0.9, metavar="SHARE", help="of a chip's memory (0.9)")
    add("--page-tokens", type=at_least(1), default=16, metavar="TOKENS", help="per KV page (16)")
    add("--max-batch-tokens", type=token_count, default=8192, metavar="TOKENS", help="of a step (8192)")
    add("--max-num-seqs", type=at_least(1), default=256, metavar="N", help="requests running at once (256)")
    add("--max-model-len", type=token_count, metavar="TOKENS", help="longest sequence; the model's if not given")
    add("--prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="share equal prefixes")
    add("--overlap", action=argparse.BooleanOptionalAction, default=True, help="schedule a step while one runs")
    add("--step-overhead", type=between(0.0, 1e4), default=0.0, metavar="MS", help="of the host per step (0)")


def _declare_traffic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE.csv", help="arrival,prompt_tokens,output_tokens,...")
    add("--rate", type=between(1e-6, 1e6), metavar="R", help="requests per second, instead of a trace")
    add("--burst", type=between(0.0, 1e4), default=1.0, metavar="CV2", help="1 Poisson, above it bursts, 0 evenly (1)")
    add("--duration", type=seconds, default=60.0, metavar="TIME", help="90, 10m, 2h: of arrivals (60)")
    add("--input-len", type=at_least(1), default=512, metavar="TOKENS", help="mean prompt (512)")
    add("--output-len", type=at_least(1), default=128, metavar="TOKENS", help="mean output (128)")
    add("--spread", type=between(0.0, 3.0), default=0.0, metavar="SIGMA", help="log-normal, of both lengths (0)")
    add("--prefixes", type=at_least(0), default=0, metavar="N", help="shared prefixes (0)")
    add("--prefix-tokens", type=at_least(0), default=0, metavar="TOKENS", help="of each, before the prompt (0)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="same seed, same traffic, same result")


def seconds(text: str) -> float:
    """ "90", "1.5s", "10m" or "2h"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is not a time above 0; write 90, 10m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def execute(args: argparse.Namespace) -> int:
    """Simulate and show."""
    if args.list:
        return _list()
    if not args.model:
        raise ConfigError("no model named", hint="hardpoint simulate --list shows the shapes that need no model")
    if args.find_replicas != bool(args.slo):
        raise ConfigError('--find-replicas and --slo "ttft_p95<0.5" belong together')
    if args.plot:
        from hardpoint.charts import need_matplotlib

        need_matplotlib("--html needs nothing")
    plan = _plan(args)
    return _search(args, plan) if args.find_replicas else _single(args, plan)


@dataclass(frozen=True)
class _Plan:
    """What is simulated, and what to tell about it."""

    deployment: Deployment
    traffic: Traffic
    facts: list[tuple[str, str]]

    def run(self, replicas: int, progress: Callable[[float], None]) -> tuple[Summary, Outcome]:
        from hardpoint.simulate.fleet import run
        from hardpoint.simulate.summary import summarize

        routed = 0

        def count(more: int) -> None:
            nonlocal routed
            routed += more
            progress(routed / len(self.traffic))

        outcome = run(self.deployment, self.traffic, replicas, count)
        return summarize(outcome, self.traffic.prompt), outcome


def _plan(args: argparse.Namespace) -> _Plan:
    from hardpoint.scheduler.settings import SchedulerSettings
    from hardpoint.simulate.cost import RooflineCost, StepCost
    from hardpoint.simulate.fleet import Deployment
    from hardpoint.simulate.hardware import load_hardware
    from hardpoint.simulate.memory import size_cache
    from hardpoint.simulate.models import activation_dtype, load_model
    from hardpoint.simulate.recorded import RecordedCost

    traffic = _traffic(args)
    hardware = load_hardware(args.hardware)
    shape, weights = load_model(args.model, weights=args.weights, max_model_len=args.max_model_len)
    activations = activation_dtype(weights)
    kv_dtype = activations if args.kv_dtype == "auto" else args.kv_dtype
    roofline = RooflineCost(shape, weights, hardware, tp=args.tp, activations=activations, kv_dtype=kv_dtype)
    cost: StepCost = RecordedCost(args.step_times) if args.step_times else roofline
    settings = SchedulerSettings(
        max_batch_tokens=args.max_batch_tokens,
        max_num_seqs=min(args.max_num_seqs, args.max_batch_tokens),
        max_model_len=shape.context,
    )
    on_chip = roofline.weight_bytes
    pages, windows = size_cache(
        shape,
        hardware,
        on_chip,
        tp=args.tp,
        settings=settings,
        kv_dtype=kv_dtype,
        page_tokens=args.page_tokens,
        memory_fraction=args.memory_fraction,
    )
    deployment = Deployment(
        cost=cost,
        settings=settings,
        windows=windows,
        num_pages=pages.num_pages,
        page_tokens=args.page_tokens,
        prefix_caching=args.prefix_caching,
        overlap=args.overlap,
        overhead=args.step_overhead / 1e3,
        routing=args.routing,
    )
    facts = [
        ("model", f"{shape.name}: {shape.parameters / 1e9:,.2f} G weights, {weights.name} ({weights.bits:.2f} bits)"),
        ("chip", f"{hardware.title}, {args.tp} per replica; {on_chip / 1e9:,.1f} GB of weights on each"),
        ("step times", str(args.step_times) if args.step_times else "cost model (roofline)"),
        ("KV cache", f"{pages.usable_pages:,} pages of {args.page_tokens} tokens ({kv_dtype}) per replica"),
        ("traffic", f"{len(traffic):,} requests in {float(traffic.arrival[-1]):,.1f} s"),
    ]
    return _Plan(deployment, traffic, facts)


def _traffic(args: argparse.Namespace) -> Traffic:
    from hardpoint.simulate.traffic import Lengths, generate, read_trace

    if (args.trace is None) == (args.rate is None):
        raise ConfigError("say which traffic: either --trace FILE or --rate R")
    if args.trace is not None:
        return read_trace(args.trace)
    if bool(args.prefixes) != bool(args.prefix_tokens):
        raise ConfigError("--prefixes N and --prefix-tokens TOKENS belong together")
    lengths = Lengths(args.input_len, args.output_len, args.spread, args.prefixes, args.prefix_tokens)
    return generate(args.rate, args.duration, lengths, burst=args.burst, seed=args.seed)


def _single(args: argparse.Namespace, plan: _Plan) -> int:
    line = console.ProgressLine()
    summary, outcome = plan.run(args.replicas, lambda done: line.update("simulate", done))
    line.clear()
    _write(args, plan, summary, outcome)
    if args.json:
        from hardpoint.simulate.summary import as_json

        print(json.dumps({"facts": dict(plan.facts), **as_json(summary)}))
        return 0
    _show(plan, summary)
    return 0


def _search(args: argparse.Namespace, plan: _Plan) -> int:
    from hardpoint.simulate.fleet import most_at_once
    from hardpoint.simulate.objective import find_replicas, parse_objectives
    from hardpoint.simulate.summary import as_json

    objectives = parse_objectives(args.slo)
    line = console.ProgressLine()
    outcomes: dict[int, Outcome] = {}

    def attempt(replicas: int) -> tuple[Summary, int]:
        summary, outcome = plan.run(replicas, lambda done: line.update(f"simulate {replicas} replicas", done))
        line.clear()
        outcomes[replicas] = outcome
        return summary, most_at_once(outcome)

    found = find_replicas(objectives, args.max_replicas, attempt)
    best = found.best
    _write(args, plan, best, outcomes[best.replicas])
    chips = None if found.replicas is None else found.replicas * args.tp
    if args.json:
        tried = [
            {
                "replicas": count,
                "refused": s.refused,
                **{o.name: o.value(s) if o.counts(s) else None for o in objectives},
            }
            for count, s in found.tried
        ]
        answer = {"replicas_needed": found.replicas, "chips_needed": chips, "tried": tried}
        print(json.dumps(answer | {"facts": dict(plan.facts), **as_json(best)}))
        return 0 if found.replicas is not None else 1
    rows = [
        [
            str(count),
            *(f"{1e3 * o.value(s):,.1f}" if o.counts(s) else "-" for o in objectives),
            f"{s.refused:,}",
            f"{s.busy:.0%}",
        ]
        for count, s in found.tried
    ]
    headers = ["replicas", *(f"{o.name} ms (<{1e3 * o.limit:,.0f})" for o in objectives), "refused", "busy"]
    console.show_table(headers, rows, right=range(len(headers)))
    print()
    _show(plan, best)
    print()
    if found.replicas is None:
        print(f"no number of replicas up to {max(count for count, _ in found.tried)} meets {args.slo}")
        return 1
    print(f"{found.replicas} replicas of {args.tp} x {args.hardware} ({chips} chips) meet {args.slo}")
    return 0


def _show(plan: _Plan, summary: Summary) -> None:
    from hardpoint.simulate.summary import statistics

    for name, value in [*plan.facts, *_results(summary)]:
        print(f"{name:<12} {value}")
    print()
    rows = []
    for metric in ("ttft", "tpot", "latency"):
        found = statistics(summary, metric)
        cells = ["-" if value is None else f"{1e3 * value:,.1f}" for value in found.values()]
        rows.append([f"{metric}, ms", *cells])
    console.show_table(["", *found], rows, right=range(1, 1 + len(found)))


def _results(summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("replicas", f"{summary.replicas}, busy {summary.busy:.0%} of {summary.makespan:,.1f} s"),
        ("requests", f"{summary.requests:,} served, {summary.refused:,} refused"),
        ("throughput", f"{summary.output_rate:,.0f} output tok/s, {summary.total_rate:,.0f} tok/s with prompts"),
        ("tokens", f"{summary.prompt_tokens:,} in, {summary.output_tokens:,} out"),
        (
            "steps",
            f"{summary.steps:,} of {1e3 * summary.step_mean:,.2f} ms with {summary.batch_mean:,.1f} requests (means)",
        ),
        ("KV use", f"mean {summary.kv_mean:.1%}, peak {summary.kv_peak:.1%} of a replica's pages"),
        ("preemptions", f"{summary.preemptions:,}; prefix cache hits {summary.prefix_hit_share:.1%} of prompt tokens"),
    ]
    return rows + ([("refused", f"the first: {summary.refusal}")] if summary.refused else [])


def _write(args: argparse.Namespace, plan: _Plan, summary: Summary, outcome: Outcome) -> None:
    from hardpoint.simulate.summary import series

    title = f"{args.model} on {summary.replicas} x {args.tp} {args.hardware}"
    if args.plot:
        from hardpoint.simulate.plot import draw

        draw(args.plot, title, summary, series(outcome))
    if args.html:
        from hardpoint.simulate.page import report

        page = report(title, _command(args), summary, series(outcome), [*plan.facts, *_results(summary)])
        try:
            args.html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {args.html}: cannot be written: {error.strerror}") from None


def _command(args: argparse.Namespace) -> str:
    """What simulates the same again: flags that are not at their defaults, but for those that say where to write."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    words = ["hardpoint", "simulate", args.model]
    for name, value in vars(parser.parse_args([])).items():
        given = getattr(args, name)
        if name in ("model", "list", "json", "plot", "html") or given == value:
            continue
        flag = name.replace("_", "-")
        if isinstance(given, bool):
            words.append(f"--{flag}" if given else f"--no-{flag}")
        else:
            words += [f"--{flag}", f"{given:.10g}" if isinstance(given, float) else str(given)]
    return shlex.join(words)


def _list() -> int:
    from hardpoint.simulate.hardware import hardware_names, load_hardware
    from hardpoint.simulate.models import shape_names

    rows = []
    for name in hardware_names():
        chip = load_hardware(name)
        peaks = ", ".join(f"{dtype} {value / 1e12:,.4g}" for dtype, value in chip.peak.items())
        rows.append([name, chip.title, peaks, f"{chip.memory_bandwidth / 1e12:.3g}", f"{chip.memory / 1e9:.0f}"])
    console.show_table(["hardware", "", "peak, T ops/s", "TB/s", "GB"], rows, right=(3, 4))
    print(f"\nshapes: {', '.join(shape_names())}")
    return 0
