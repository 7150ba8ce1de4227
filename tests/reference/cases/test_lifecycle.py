"""Deadlines, aborts at any moment, priorities, and what requests hold meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import Driver, ManualClock, assert_same

from hardpoint import SamplingParams

pytestmark = pytest.mark.reference


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | changes))


def test_a_deadline_ends_requests_wherever_they_are(overlap: bool, device: str, tiny: Any, prompt_of: Any) -> None:
    clock = ManualClock()
    with Driver(tiny, device=device, overlap=overlap, clock=clock, max_num_seqs=2, budget=16) as driver:
        whole = driver.ask_one(prompt_of(10), _params())
        (running,) = driver.submit(prompt_of(10), _params(), deadline=5.0)
        (prefilling,) = driver.submit(prompt_of(300), _params(), deadline=5.0)
        queued = driver.submit(prompt_of(12), _params(n=3), deadline=5.0)  # one waits, two are parked
        (patient,) = driver.submit(prompt_of(10), _params(), deadline=500.0)
        for _ in range(6):
            driver.step()
        clock.time += 4.5  # the front end's share of the time counts too, so not quite 5
        driver.step()
        assert running.finish_reason is None
        clock.time += 1.0
        driver.step()
        for answer in (running, prefilling, *queued):
            assert answer.finish_reason == "timeout"
        assert 0 < len(running.token_ids) < 40
        assert running.token_ids == whole.token_ids[: len(running.token_ids)]
        assert prefilling.token_ids == queued[0].token_ids == []
        driver.run()
        assert_same(patient, whole)
        assert (driver.used_pages, driver.engine.stats().waiting) == (0, 0)
        # one that is late already is not started
        clock.time += 10.0
        (late,) = driver.submit(prompt_of(10), _params(), deadline=0.0)
        driver.run()
        assert (late.finish_reason, late.token_ids) == ("timeout", [])


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_abort_at_any_moment_returns_the_pages(
    prefix_caching: bool, overlap: bool, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    """Before its first step, between chunks, right behind the prompt, in the middle of decoding, among siblings."""
    driver = start(tiny, device=device, overlap=overlap, prefix_caching=prefix_caching, budget=16, max_num_seqs=6)
    assert driver.info.prefix_caching is prefix_caching
    neighbour = driver.ask_one(prompt_of(10), _params(max_tokens=20))
    free = driver.scheduler.pager.available_pages
    for steps in (0, 1, 2, 3, 4, 6, 9):
        driver.submit(prompt_of(50, steps), _params(n=3, temperature=1.0), name="gone")
        driver.submit(prompt_of(60, steps), _params(prompt_logprobs=1), name="scored")
        (beside,) = driver.submit(prompt_of(10), _params(max_tokens=20))
        for _ in range(steps):
            driver.step()
        driver.abort("gone")
        driver.step()
        driver.abort("scored")
        driver.run()
        assert_same(beside, neighbour)
        assert driver.scheduler.pager.available_pages == free
        assert driver.engine.stats().running == driver.engine.stats().waiting == 0
    # and the pool can hold a request of nearly its full size
    assert driver.ask_one(prompt_of(500), _params(max_tokens=12)).finish_reason == "length"


def test_one_of_several_sequences_may_be_aborted(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device)
    params = _params(n=3, temperature=1.0, seed=1, max_tokens=20)
    whole = driver.ask(prompt_of(50), params)
    for victim in range(3):
        for steps in (0, 1, 4):
            answers = driver.submit(prompt_of(50), params, name="r")
            for _ in range(steps):
                driver.step()
            driver.engine.abort(f"r#{victim}")
            driver.run()
            for index, (got, wanted) in enumerate(zip(answers, whole, strict=True)):
                if index != victim:
                    assert_same(got, wanted)


def test_waste_is_less_than_a_page_per_sequence(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device, prefix_caching=False, overlap=False)
    lengths = [5, 16, 17, 33, 60]
    answers = [driver.submit(prompt_of(length), _params(max_tokens=30))[0] for length in lengths]
    driver.step()
    while driver.engine.has_work:
        rows = driver.scheduler.rows
        held = driver.used_pages * 16
        computed = int(rows.computed[rows.order()].sum())
        assert 0 <= held - computed < 16 * len(rows) + 1
        driver.step()
    assert all(len(answer.token_ids) == 30 for answer in answers)


def test_priorities_overtake(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device, policy="priority", max_num_seqs=1)
    assert driver.info.policy == "priority"
    order: list[int] = []
    answers = {
        priority: driver.submit(prompt_of(8, priority), _params(max_tokens=3), priority=priority)[0]
        for priority in (5, 3, 9, -2, 0)
    }
    while driver.engine.has_work:
        driver.step()
        order += [p for p, answer in answers.items() if answer.finish_reason and p not in order]
    assert order == [-2, 0, 3, 5, 9]
    # first come, first served does not look at them
    driver = start(tiny, device=device, policy="fcfs", max_num_seqs=1)
    first = driver.submit(prompt_of(8), _params(max_tokens=3), priority=9)[0]
    second = driver.submit(prompt_of(8), _params(max_tokens=3), priority=0)[0]
    driver.run(until=lambda: bool(first.finish_reason))
    assert second.finish_reason is None
    driver.run()


def test_a_higher_priority_takes_the_pages(overlap: bool, device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    roomy = start(tiny, device=device)
    driver = start(tiny, device=device, overlap=overlap, policy="priority", pages=10)
    low = [driver.submit(prompt_of(50, seed), _params(), priority=7)[0] for seed in range(2)]
    for _ in range(5):
        driver.step()
    (high,) = driver.submit(prompt_of(120), _params(max_tokens=10), priority=1)
    driver.run(until=lambda: bool(high.finish_reason))
    assert not any(answer.finish_reason for answer in low)
    driver.run()
    assert_same(high, roomy.ask_one(prompt_of(120), _params(max_tokens=10)))
    for seed, answer in enumerate(low):
        assert_same(answer, roomy.ask_one(prompt_of(50, seed), _params()))
    assert high.preemptions == 0
    assert sum(answer.preemptions for answer in low) >= 1
