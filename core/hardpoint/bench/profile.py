"""`hardpoint bench profile`: what the device does during decode steps, and when it does nothing.

Steps run as they do when serving, one scheduled while the one before runs. torch's profiler notes when each kernel
began and ended on the device; a gap between two of them is time that the host, or the start of a kernel, cost. Devices
that the profiler sees nothing of are looked at from the host: busy is while one of their programs runs.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardpoint.bench.overhead import runner_of
from hardpoint.charts import figure, save
from hardpoint.config.engine import EngineConfig
from hardpoint.engine.build import build_engine
from hardpoint.engine.loop import Engine
from hardpoint.errors import ConfigError, EngineError
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams

#: Decode steps before those that count.
_WARM_UP = 10
#: Steps that a picture shows.
_SHOWN_STEPS = 3
#: Microseconds; a shorter gap is the hand-over from kernel to kernel.
SHORT_GAP = 5.0


@dataclass(frozen=True)
class Busy:
    """Something the device did: microseconds on one clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Work:
    """All that one kernel did. calls and microseconds: per step."""

    name: str
    calls: float
    microseconds: float


@dataclass(frozen=True)
class Profile:
    """Decode steps of one crowd.

    Attributes:
        device: name; requests: decoding at once; steps: looked at.
        by_kernels: whether the device was seen itself, not its programs from the host.
        spans: by start.
        step: milliseconds per step, from the first span to the last one's end.
        idle: share of that time in which no span is under way.
        hand_over: the part of `idle` that is in gaps of less than SHORT_GAP microseconds.
    """

    device: str
    requests: int
    steps: int
    by_kernels: bool
    spans: tuple[Busy, ...]
    step: float
    idle: float
    hand_over: float

    def work(self) -> list[Work]:
        """By kernel, the longest first."""
        spent: dict[str, list[float]] = defaultdict(list)
        for span in self.spans:
            spent[span.name].append(span.end - span.start)
        found = [Work(name, len(each) / self.steps, sum(each) / self.steps) for name, each in spent.items()]
        return sorted(found, key=lambda work: -work.microseconds)


def profile(config: EngineConfig, requests: int, *, input_len: int, steps: int, trace: Path | None = None) -> Profile:
    """Look at `steps` decode steps of `requests` requests. `trace`: where the profiler's own file goes.

    Raises HardpointError; ConfigError where the trace cannot be written.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell of each start and stop of its own
    built = build_engine(config)
    try:
        engine = built.engine
        _fill(engine, np.random.default_rng(config.model.seed), requests, input_len, steps, built.info.vocab_size)
        # One that the profiler sets itself up in, which takes it long.
        with torch.profiler.profile(activities=torch.profiler.supported_activities()):
            engine.step()
        from_host = _watch(engine)
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as seen:
            for _ in range(steps):
                engine.step()
            for stage in runner_of(engine)._stages:
                stage.device.synchronize()  # the profiler is still to see the last kernels
        if trace is not None:
            _write(seen, trace)
        spans = _device_spans(seen)
        shown = tuple(spans or from_host)
        step, idle, hand_over = measure(shown, steps)
        return Profile(built.info.device, requests, steps, bool(spans), shown, step, idle, hand_over)
    finally:
        built.engine.close()


def measure(spans: Sequence[Busy], steps: int) -> tuple[float, float, float]:
    """Milliseconds per step, the share in which nothing is under way, and the part of it in short gaps.

    Spans may overlap. Raises EngineError for none.
    """
    if not spans:
        raise EngineError("the profiler saw no work of the device")
    ordered = sorted(spans, key=lambda span: span.start)
    begin, reached = ordered[0].start, ordered[0].end
    gaps = []
    for span in ordered[1:]:
        if span.start > reached:
            gaps.append(span.start - reached)
        reached = max(reached, span.end)
    whole = reached - begin
    short = sum(gap for gap in gaps if gap < SHORT_GAP)
    return whole / steps / 1e3, sum(gaps) / whole, short / whole


def _fill(
    engine: Engine, random: np.random.Generator, requests: int, input_len: int, steps: int, vocabulary: int
) -> None:
    """Let `requests` requests in and step until all have decoded for a while."""
    wanted = steps + 2 * _WARM_UP
    params = SamplingParams(temperature=0.0, max_tokens=wanted + requests + 64, ignore_eos=True)
    for number in range(requests):
        prompt = random.integers(0, vocabulary, input_len).tolist()
        engine.add(EngineRequest(request_id=f"profile-{number}", prompt=prompt, params=params))
    decoded = 0
    while decoded < _WARM_UP:
        outputs = engine.step().outputs
        failed = next((output.error for output in outputs if output.error), None)
        if failed:
            raise EngineError(f"a request failed: {failed}")
        decoded += len(outputs) == requests


def _watch(engine: Engine) -> list[Busy]:
    """Note from now on, in the list returned, when a program of the device runs; the engine knows nothing of it."""
    spans: list[Busy] = []
    for number, stage in enumerate(runner_of(engine)._stages):
        for program in stage._programs.values():
            program.run = _noted(program.run, f"program of stage {number}", spans)
    return spans


def _noted(run: Callable[..., Any], name: str, spans: list[Busy]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*args)
        finally:
            spans.append(Busy(name, started * 1e6, time.perf_counter() * 1e6))

    return noted


def _device_spans(seen: Any) -> list[Busy]:
    """What the profiler saw of anything but the host."""
    events = seen.profiler.kineto_results.events()
    spans = [
        Busy(event.name(), event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3)
        for event in events
        if event.device_type().name != "CPU" and event.duration_ns() > 0
    ]
    return sorted(spans, key=lambda span: span.start)


def _write(seen: Any, trace: Path) -> None:
    try:
        trace.touch()
    except OSError as error:
        raise ConfigError(f"--trace {trace}: cannot be written: {error.strerror}") from None
    seen.export_chrome_trace(str(trace))


def draw(path: Path, found: Profile) -> None:
    """A PNG of a few steps: what the device did, on a line of time. Raises ConfigError without matplotlib."""
    drawn = figure(12, 4)
    axis = drawn.subplots()
    begin = found.spans[0].start
    until = begin + _SHOWN_STEPS * found.step * 1e3
    names = [work.name for work in found.work()]
    shown = {name: place for place, name in enumerate(names[:9])}
    bars: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span in found.spans:
        if span.start < until:
            bars[shown.get(span.name, 9)].append(((span.start - begin) / 1e3, (span.end - span.start) / 1e3))
    for place, spans in sorted(bars.items()):
        label = names[place][:48] if place < 9 else "others"
        axis.broken_barh(spans, (0, 1), facecolors=f"C{place}", label=label)
    axis.set(
        title=f"{found.device}, {found.requests} requests: {found.step:.2f} ms per step, idle {found.idle:.1%}",
        xlabel="milliseconds; white: the device does nothing",
        yticks=[],
    )
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize="small")
    save(drawn, path)


def lines(found: Profile, top: int) -> list[str]:
    """The profile as text for people."""
    seen = (
        "kernels, by torch's profiler" if found.by_kernels else "programs, from the host (the profiler sees no device)"
    )
    told = [
        f"{found.device}: {found.requests} requests decoding, {found.steps} steps; {seen}",
        f"{found.step:.3f} ms per step; idle {found.idle:.1%}, {found.hand_over:.1%} in gaps under {SHORT_GAP:g} us",
        "",
        f"{'us per step':>12}{'share':>8}{'calls':>8}   kernel",
    ]
    for work in found.work()[:top]:
        share = work.microseconds / found.step / 1e3
        told.append(f"{work.microseconds:>12.1f}{share:>8.1%}{work.calls:>8.1f}   {work.name[:90]}")
    return told
