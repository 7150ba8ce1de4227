"""Too few pages: who yields, what it keeps, and that nothing waits for ever (cases S-08 and S-23)."""

from __future__ import annotations

import pytest
from driving import Driver, batch

from hardpoint.request.request import Status
from hardpoint.request.sampling import SamplingParams


def test_the_last_arrived_yields_and_keeps_its_tokens() -> None:
    driver = Driver(pages=6, page_tokens=4, prefix_caching=False)
    a, b = driver.add("a", 7, output=12), driver.add("b", 7, output=12)
    for _ in range(6):
        driver.step()
    assert (len(a.output), len(b.output), b.preemptions) == (6, 6, 0)  # 12 tokens computed each: all 6 pages are full
    plan = driver.step()
    assert plan is not None
    assert batch(plan) == [(0, 1)]
    assert (b.status, b.preemptions, b.row, len(b.output)) == (Status.PREEMPTED, 1, -1, 6)
    assert driver.pager.used_pages == 4
    driver.drain()
    assert driver.tokens("b") == driver.alone(b, 12)
    assert driver.tokens("a") == driver.alone(a, 12)
    assert driver.scheduler.preemptions == b.preemptions == 1


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    driver = Driver(pages=7, page_tokens=4)
    driver.add("a", 7, output=12)
    b = driver.add("b", 7, output=12)
    while not b.preemptions:
        driver.step()
    known = b.known
    while b.status is not Status.RUNNING:
        plan = driver.step()
    assert plan is not None
    (new,) = plan.new
    assert (new.request_id, len(new.tokens), new.prompt_length) == ("b", known, 7)
    assert plan.computed.max() > 0, "nothing of it was left in the cache"
    driver.drain()
    assert b.cached_tokens == 0, "what it found when it came back does not count"


def test_a_draw_in_flight_is_kept_and_awaited() -> None:
    driver = Driver(pages=6, page_tokens=4, prefix_caching=False)
    driver.add("a", 7, output=12)
    b = driver.add("b", 7, output=12)
    driver.schedule()
    while not b.preemptions:
        driver.schedule()
        if not b.preemptions:
            driver.update()
    before = len(b.output)
    assert b.in_flight == 1
    driver.scheduler.abort("a")
    assert driver.schedule() is None, "it came back before its result was in"
    driver.update()
    assert (len(b.output), b.in_flight, b.status) == (before + 1, 0, Status.PREEMPTED)
    assert driver.schedule() is not None
    driver.drain()
    assert driver.tokens("b") == driver.alone(b, 12)


def test_a_preempted_request_may_end_by_the_draw_in_flight() -> None:
    driver = Driver(pages=5, page_tokens=4, prefix_caching=False)
    driver.add("a", 7, output=9)
    b = driver.add("b", 7, output=None)
    stop = driver.alone(b, 4)[-1]
    driver.scheduler.abort("b")
    driver.outputs["b"].clear()
    b = driver.add("b", b.prompt.tolist(), params=SamplingParams(max_tokens=None, seed=0, stop_token_ids=(stop,)))
    driver.drain()
    assert (b.finish_reason, b.stop_reason, len(b.output)) == ("stop", stop, 4)


def test_the_lowest_priority_yields() -> None:
    driver = Driver(pages=6, page_tokens=4, policy="priority", prefix_caching=False)
    low, high = driver.add("low", 7, output=12, priority=3), driver.add("high", 7, output=12, priority=1)
    driver.drain()
    assert (low.preemptions, high.preemptions) == (1, 0)
    assert driver.tokens("low") == driver.alone(low, 12)


def test_an_urgent_request_takes_the_place_of_a_running_one() -> None:
    driver = Driver(pages=8, page_tokens=4, policy="priority", prefix_caching=False)
    slow = driver.add("slow", 16, output=12, priority=5)
    driver.step()
    driver.add("urgent", 20, output=2, priority=0)
    plan = driver.step()
    assert plan is not None
    assert [new.request_id for new in plan.new] == ["urgent"]
    assert slow.status is Status.PREEMPTED
    driver.drain()
    assert driver.tokens("slow") == driver.alone(slow, 12)


def test_nobody_yields_in_vain_nor_to_an_equal() -> None:
    driver = Driver(pages=12, page_tokens=4, policy="priority", prefix_caching=False)
    high, low = driver.add("high", 28, output=8, priority=0), driver.add("low", 8, output=8, priority=5)
    driver.step()
    driver.add("next", 40, output=2, priority=1)  # would not fit beside `high` even without `low`
    driver.add("equal", 40, output=2, priority=5)
    driver.step()
    assert (high.preemptions, low.preemptions) == (0, 0)
    driver.drain()


def test_a_lone_request_that_outgrows_the_pool_ends_by_length_and_blocks_nobody() -> None:
    """S-08: 20 pages of 16 tokens, context 512, 64 tokens per step."""
    driver = Driver(pages=20, page_tokens=16, context=512, budget=64)
    grows = driver.add("b", 300, output=100)
    short = [driver.add(f"c{i}", 5, output=3) for i in range(5)]
    driver.drain()
    assert (grows.finish_reason, len(grows.output)) == ("length", 21)  # 320 tokens fit, the last is never computed
    assert [len(r.output) for r in short] == [3] * 5


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
@pytest.mark.parametrize("depth", [0, 1])
def test_six_requests_in_a_pool_for_two_all_come_to_their_end(windows: tuple[int | None, ...], depth: int) -> None:
    """S-23: each equals its solo run; somebody is preempted twice."""
    driver = Driver(pages=12 * len(windows), page_tokens=4, windows=windows, budget=16)
    requests = [driver.add(f"r{i}", 5, output=25, seed=i) for i in range(6)]
    ticks = 0
    while driver.scheduler.has_work:
        ticks += 1
        assert ticks < 600
        plan = driver.schedule()
        while driver.pending and (plan is None or len(driver.pending) > depth):
            driver.update()
            plan = plan or driver.schedule() if driver.scheduler.requests and not driver.pending else plan
    for request in requests:
        assert driver.tokens(request.id) == driver.alone(request, 25)
    if windows == (None,):
        assert driver.scheduler.preemptions > 1
