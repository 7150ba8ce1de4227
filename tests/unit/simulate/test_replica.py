"""The virtual clock over the real scheduler: by hand for one request, leaps against steps bit for bit, routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hardpoint.errors import ConfigError
from hardpoint.scheduler.settings import SchedulerSettings
from hardpoint.simulate import fleet
from hardpoint.simulate.fleet import Deployment, Outcome, most_at_once, run
from hardpoint.simulate.replica import Replica, StepLog
from hardpoint.simulate.summary import series, statistic, summarize
from hardpoint.simulate.traffic import Lengths, Traffic, generate

Make = Callable[..., Deployment]
COLUMNS = ("start", "seconds", "running", "waiting", "tokens", "pages")


def requests(*rows: tuple[float, int, int]) -> Traffic:
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    none = np.full(len(rows), -1)
    return Traffic(arrival.astype(float), prompt, output, none, np.zeros(len(rows), np.int64))


def logged(log: StepLog) -> list[list[float]]:
    return [getattr(log, name).tolist() for name in COLUMNS]


def test_one_request_by_hand(deployment: Make) -> None:
    outcome = run(deployment(overlap=False, overhead=0.002), requests((1.0, 300, 3)), 1)
    # 256 tokens of the prompt, 44 tokens of it, then two tokens; each step costs 2 ms of the host
    seconds = [
        1e-3 + 1e-5 * 256 + 1e-7 * 256,
        1e-3 + 1e-5 * 44 + 1e-7 * 300,
        1e-3 + 1e-5 + 1e-7 * 301,
        1e-3 + 1e-5 + 1e-7 * 302,
    ]
    assert outcome.logs[0].seconds.tolist() == pytest.approx(seconds)
    assert outcome.logs[0].start[0] == pytest.approx(1.002)
    (one,) = outcome.finished
    assert one.first_token == pytest.approx(1.0 + sum(seconds[:2]) + 0.004)
    assert one.finished == pytest.approx(1.0 + sum(seconds) + 0.008)
    assert (one.output, one.preemptions, outcome.logs[0].pages.tolist()) == (3, 0, [16, 19, 19, 19])


def test_a_request_that_comes_during_a_step_waits_one_step_longer_when_overlapped(deployment: Make) -> None:
    traffic = requests((0.0, 100, 50), (0.010, 10, 1))
    plain, overlapped = (run(deployment(overlap=overlap), traffic, 1).finished[1] for overlap in (False, True))
    step = 1.02e-3
    assert overlapped.first_token - plain.first_token == pytest.approx(step, rel=0.2)


def test_overhead_is_hidden_by_overlap(deployment: Make) -> None:
    traffic = requests((0.0, 100, 400))
    hidden, plain = (
        run(deployment(overlap=overlap, overhead=0.5e-3), traffic, 1).finished[0].finished for overlap in (True, False)
    )
    assert plain - hidden == pytest.approx(400 * 0.5e-3, rel=0.02)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [600, 60])
@pytest.mark.parametrize("caching", [False, True])
def test_leaping_changes_nothing(deployment: Make, overlap: bool, pages: int, caching: bool) -> None:
    small = SchedulerSettings(max_batch_tokens=64, max_num_seqs=8, max_model_len=512)
    made = deployment(overlap=overlap, num_pages=pages, prefix_caching=caching, settings=small, overhead=1e-4)
    rate = 12 if pages == 600 else 70
    traffic = generate(rate, 60 / rate, Lengths(120, 60, 0.8, prefixes=2, prefix_tokens=40), burst=3, seed=pages)
    fast, slow = run(made, traffic, 2), run(replace(made, leaping=False), traffic, 2)
    assert fast.finished == slow.finished
    assert fast.refused == slow.refused
    assert [logged(log) for log in fast.logs] == [logged(log) for log in slow.logs]
    assert (fast.preemptions, fast.prefix_hits) == (slow.preemptions, slow.prefix_hits)
    assert (fast.preemptions > 0) == (pages == 60)
    assert (fast.prefix_hits > 0) == caching


@pytest.mark.parametrize("overlap", [False, True])
def test_a_leap_leaves_scheduler_and_pager_as_steps_do(deployment: Make, overlap: bool) -> None:
    traffic = requests((0.0, 37, 400), (0.0, 50, 300), (0.01, 16, 500))
    replicas: list[Replica] = []
    for leaping in (True, False):
        replica = deployment(overlap=overlap, leaping=leaping).replica()
        for index in range(len(traffic)):
            fleet._arrive(replica, traffic, index)
        replica.advance(0.2)
        replica.scheduler.check_integrity()
        replicas.append(replica)
    fast, slow = (replica.scheduler for replica in replicas)
    assert len(replicas[0].log.start) == len(replicas[1].log.start) > 150
    for name, request in fast.requests.items():
        other = slow.requests[name]
        assert request.output == other.output
        assert request.digests(5, 16)[:5] == other.digests(5, 16)[:5]
    assert fast.rows.computed.tolist() == slow.rows.computed.tolist()
    for mine, theirs in zip(
        fast.pager.snapshot(fast.rows.order()), slow.pager.snapshot(slow.rows.order()), strict=True
    ):
        assert mine.tolist() == theirs.tolist()
    assert fast.generated_tokens == slow.generated_tokens


def test_leaps_do_happen(deployment: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    from hardpoint.scheduler.scheduler import Scheduler

    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self, now: calls.append(now) or schedule(self, now))
    outcome = run(deployment(), requests((0.0, 10, 1000)), 1)
    assert len(outcome.logs[0].start) == 1000
    assert len(calls) < 50


def test_refusals_are_kept_apart(deployment: Make) -> None:
    outcome = run(deployment(), requests((0.0, 5000, 4), (0.0, 10, 4)), 1)
    assert [one.index for one in outcome.finished] == [1]
    assert outcome.refused[0][0] == 0
    assert "5000 tokens" in outcome.refused[0][1]
    summary = summarize(outcome, np.array([5000, 10]))
    assert (summary.refused, summary.prompt_tokens, summary.output_tokens) == (1, 10, 4)


def balanced_slowly(made: Deployment, traffic: Traffic, replicas: int) -> Outcome:
    """Least loaded, every replica brought up to every arrival."""
    several = [made.replica() for _ in range(replicas)]
    for index, arrival in enumerate(traffic.arrival.tolist()):
        for replica in several:
            replica.advance(arrival)
        fleet._arrive(min(several, key=lambda replica: replica.outstanding), traffic, index)
    for replica in several:
        replica.advance(float("inf"))
    return fleet._outcome(several)


@pytest.mark.parametrize("rate", [10, 60])
def test_least_loaded_looks_only_where_it_must(deployment: Make, rate: float) -> None:
    traffic = generate(rate, 10, Lengths(80, 60, 0.9), burst=2, seed=4)
    made = deployment(routing="least-loaded")
    fast, slow = run(made, traffic, 3), balanced_slowly(made, traffic, 3)
    assert fast.finished == slow.finished
    assert [logged(log) for log in fast.logs] == [logged(log) for log in slow.logs]


def test_routing(deployment: Make) -> None:
    traffic = requests((0.0, 10, 400), (0.01, 10, 2), (0.02, 10, 400), (0.1, 10, 400))
    even = run(deployment(), traffic, 2)
    assert most_at_once(even) == 2
    assert even.logs[1].start[2] == pytest.approx(0.1, abs=2e-3)
    loaded = run(deployment(routing="least-loaded"), traffic, 2)
    assert sorted(one.index for one in loaded.finished) == [0, 1, 2, 3]
    assert loaded.logs[1].start[2] == pytest.approx(0.02, abs=2e-3)
    with pytest.raises(ConfigError, match="--routing"):
        run(deployment(routing="random"), traffic, 2)


def test_the_summary_adds_up(deployment: Make) -> None:
    traffic = generate(20, 20, Lengths(60, 30, 0.5), seed=1)
    outcome = run(deployment(), traffic, 2)
    summary = summarize(outcome, traffic.prompt)
    assert summary.requests == len(traffic)
    assert summary.output_tokens == int(traffic.output.sum())
    assert summary.prompt_tokens == int(traffic.prompt.sum())
    assert statistic(summary.ttft, "p50") == pytest.approx(float(np.median(summary.ttft)))
    assert 0 < summary.busy < 1
    assert 0 < summary.kv_mean < summary.kv_peak < 1
    over_time = series(outcome, 50)
    seconds = sum(sum(log.seconds) for log in outcome.logs)
    ran = sum(float(np.dot(log.running, log.seconds)) for log in outcome.logs)
    assert float((over_time.running * over_time.width).sum()) == pytest.approx(ran)
    assert float((over_time.token_rate * over_time.width).sum()) == sum(sum(log.tokens) for log in outcome.logs)
    assert summary.step_mean == pytest.approx(seconds / summary.steps)
