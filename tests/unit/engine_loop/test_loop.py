"""The engine loop over the real scheduler and an executor that computes nothing, plain and overlapped."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from null_engines import PacedExecutor, scheduler

from hardpoint.engine.loop import Engine
from hardpoint.protocol.messages import STEP_SIZE_BOUNDS, EngineRequest, TokenOutput
from hardpoint.request.sampling import SamplingParams
from hardpoint_platforms.errors import DeviceLost
from hardpoint_platforms.streams import Clock

MODES = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


class ManualClock(Clock):
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def request(name: str, length: int = 5, max_tokens: int = 4, **more: object) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt=list(range(1, length + 1)), params=params, **more)  # type: ignore[arg-type]


def run(engine: Engine, steps: int = 1000) -> dict[str, list[TokenOutput]]:
    found: dict[str, list[TokenOutput]] = {}
    while engine.has_work and steps:
        steps -= 1
        for output in engine.step().outputs:
            found.setdefault(output.request_id, []).append(output)
        engine._scheduler.check_integrity()
    return found


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@MODES
def test_requests_come_to_their_end(overlap: bool) -> None:
    engine = Engine(scheduler(), PacedExecutor(), overlap=overlap)
    for i in range(20):
        engine.add(request(f"r{i}", length=3 + 7 * i, max_tokens=1 + i))
    found = run(engine)
    assert [len(tokens(found[f"r{i}"])) for i in range(20)] == [1 + i for i in range(20)]
    assert all([o.finish_reason for o in outputs if o.finish_reason] == ["length"] for outputs in found.values())
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.generated_tokens == sum(range(1, 21))
    assert stats.prompt_tokens == sum(3 + 7 * i for i in range(20))
    assert not engine.has_work


def test_overlap_has_the_next_step_submitted_before_it_reads_the_last() -> None:
    executor = PacedExecutor()
    engine = Engine(scheduler(), executor, overlap=True)
    engine.add(request("a"))
    assert engine.step().outputs == []
    assert len(executor.plans) == 1
    assert len(engine.step().outputs) == 1
    assert len(executor.plans) == 2


def test_both_modes_draw_the_same_tokens() -> None:
    drawn = []
    for overlap in (False, True):
        engine = Engine(scheduler(), PacedExecutor(), overlap=overlap)
        engine.add(request("a", length=100, max_tokens=30))
        drawn.append(tokens(run(engine)["a"]))
    assert drawn[0] == drawn[1]


@MODES
def test_abort_takes_effect_before_the_next_step_and_brings_no_output(overlap: bool) -> None:
    executor = PacedExecutor()
    engine = Engine(scheduler(), executor, overlap=overlap)
    engine.add(request("gone", max_tokens=100))
    engine.add(request("stays", max_tokens=10))
    for _ in range(3):
        engine.step()
    planned = len(executor.plans)
    assert engine.abort("gone")
    assert not engine.abort("gone")
    found = run(engine)
    assert "gone" not in found
    assert all(len(plan.rows) == 1 for plan in executor.plans[planned:])
    assert engine.stats().pages_used == 0


@MODES
def test_refusals_are_outputs(overlap: bool) -> None:
    engine = Engine(scheduler(max_model_len=64, max_waiting=2), PacedExecutor(), overlap=overlap)
    engine.add(request("long", length=65))
    for name in ("a", "b", "c"):
        engine.add(request(name))
    assert engine.has_work
    first = {o.request_id: o for o in engine.step().outputs}
    assert (first["long"].finish_reason, first["long"].error_kind, first["long"].error_field) == (
        "error",
        "PromptTooLong",
        "prompt",
    )
    assert first["c"].error_kind == "TooManyRequests"
    assert {"a", "b"} <= set(run(engine))


@MODES
def test_deadline(overlap: bool) -> None:
    clock = ManualClock()
    engine = Engine(scheduler(), PacedExecutor(), overlap=overlap, clock=clock)
    engine.add(request("late", max_tokens=100, deadline=5.0))
    for _ in range(4):
        engine.step()
    clock.time += 6.0
    ended = [o for outputs in run(engine).values() for o in outputs if o.finish_reason]
    assert [o.finish_reason for o in ended] == ["timeout"]
    assert ended[0].timing is not None
    assert engine.stats().pages_used == 0


@MODES
def test_a_deadline_within_the_prompt_tells_the_cached_tokens(overlap: bool) -> None:
    """They come with the first output, and here that is the last."""
    clock = ManualClock()
    engine = Engine(scheduler(), PacedExecutor(), overlap=overlap, clock=clock)
    engine.add(request("before", length=64))
    run(engine)
    engine.add(request("late", length=1000, deadline=5.0))
    engine.add(request("queued", length=64, deadline=-1.0))
    early = engine.step().outputs
    clock.time += 6.0
    outputs = {o.request_id: o for o in [*early, *(o for outputs in run(engine).values() for o in outputs)]}
    assert {name: o.finish_reason for name, o in outputs.items()} == {"late": "timeout", "queued": "timeout"}
    assert (outputs["late"].cached_tokens, outputs["late"].token_ids) == (64, [])
    assert outputs["queued"].cached_tokens is None


@MODES
def test_steps_are_counted_by_their_tokens(overlap: bool) -> None:
    executor = PacedExecutor()
    engine = Engine(scheduler(), executor, overlap=overlap)
    assert engine.stats().step_tokens == 0
    engine.add(request("a", length=100, max_tokens=4))
    engine.add(request("b", length=20, max_tokens=9))
    run(engine)
    sizes = [int(plan.query_lengths.sum()) for plan in executor.plans]
    edges = [0, *STEP_SIZE_BOUNDS, 10**9]
    wanted = [sum(low < size <= high for size in sizes) for low, high in itertools.pairwise(edges)]
    stats = engine.stats()
    assert list(stats.step_sizes) == wanted
    assert max(wanted) > 1
    assert (stats.step_tokens, stats.steps) == (sum(sizes), sum(wanted))


def test_requests_without_a_seed_get_one() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        executor = PacedExecutor()
        engine = Engine(scheduler(), executor, overlap=False, seed=seed)
        for name in ("a", "b"):
            engine.add(request(name))
        own = request("own")
        engine.add(msgspec.structs.replace(own, params=msgspec.structs.replace(own.params, seed=7)))
        run(engine)
        return [new.params.seed for plan in executor.plans for new in plan.new]

    a, b, own = seeds(None)
    assert None not in (a, b)
    assert a != b
    assert own == 7
    assert seeds(3) == seeds(3)
    assert seeds(3)[:2] != seeds(None)[:2]


@MODES
def test_a_lost_device_ends_every_request_with_an_error(overlap: bool) -> None:
    executor = PacedExecutor(lost_at=3)
    engine = Engine(scheduler(), executor, overlap=overlap)
    for name in ("a", "b"):
        engine.add(request(name, max_tokens=50))
    with pytest.raises(DeviceLost):
        run(engine)
    outputs = engine.fail("lost").outputs
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("a", "error", "lost"),
        ("b", "error", "lost"),
    ]
    engine.close()
    engine.close()
    assert executor.closed


@MODES
def test_children_outlive_an_aborted_parent(overlap: bool) -> None:
    engine = Engine(scheduler(), PacedExecutor(), overlap=overlap)
    engine.add(request("p#0", length=200, max_tokens=5))
    engine.add(request("p#1", length=200, max_tokens=5, parent="p#0"))
    engine.step()
    engine.abort("p#0")
    assert len(tokens(run(engine)["p#1"])) == 5


def test_prefix_cache_is_counted_and_reset() -> None:
    engine = Engine(scheduler(), PacedExecutor(), overlap=False)
    for name in ("a", "b"):
        engine.add(request(name, length=64))
        run(engine)
    assert engine.stats().prefix_hits > 0
    assert engine.stats().pages_cached > 0
    engine.reset_prefix_cache()
    assert engine.stats().pages_cached == 0
