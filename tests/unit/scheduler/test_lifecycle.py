"""Ends of all kinds, at every moment; overlap; refusals at the door."""

from __future__ import annotations

import pytest
from driving import Driver, batch

from hardpoint.errors import ConfigError, EngineError, PromptTooLong, RequestError, TooManyRequests
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.request import Request, Status
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.settings import SchedulerSettings, StepLimits


def test_abort_while_waiting_running_in_flight_and_after() -> None:
    driver = Driver(rows=1)
    a, b = driver.add("a", 5), driver.add("b", 5)
    driver.schedule()
    assert driver.scheduler.abort("b")
    assert driver.scheduler.abort("a")
    assert not driver.scheduler.abort("a")
    assert not driver.scheduler.abort("nobody")
    assert driver.scheduler.has_work, "a result is still to come"
    assert driver.update() == []
    assert not driver.scheduler.has_work
    assert (a.finish_reason, b.finish_reason, driver.pager.used_pages) == ("abort", "abort", 0)


def test_deadlines_end_requests_wherever_they_are() -> None:
    driver = Driver(rows=1, budget=4)
    running, waiting = driver.add("a", 5, output=50, deadline=3.0), driver.add("b", 5, deadline=2.0)
    driver.add("c", 5, output=2, deadline=500.0)
    assert driver.scheduler.expire(1.9) == []
    driver.step()
    assert driver.scheduler.expire(2.0) == [waiting]
    driver.step()
    assert driver.scheduler.expire(3.5) == [running]
    assert {running.finish_reason, waiting.finish_reason} == {"timeout"}
    driver.drain()
    assert len(driver.tokens("c")) == 2
    assert driver.scheduler.expire(1000.0) == []


def test_steps_overlap_and_never_go_past_what_is_counted() -> None:
    driver = Driver()
    a = driver.add("a", 5, output=3)
    plans = [driver.schedule() for _ in range(4)]
    assert [None if plan is None else plan.computed.tolist() for plan in plans] == [[0], [5], [6], None]
    while driver.pending:
        driver.update()
    assert driver.tokens("a") == driver.alone(a, 3)


def test_the_context_ends_a_request_by_count() -> None:
    driver = Driver(context=8)
    a = driver.add("a", 5, output=None)
    while driver.schedule() is not None:
        pass
    driver.drain()
    assert (len(a.output), a.finish_reason) == (3, "length")


def test_a_draw_after_the_end_is_dropped() -> None:
    driver = Driver()
    probe = driver.add("probe", range(5), output=2)
    driver.drain()
    a = driver.add("a", range(5), params=SamplingParams(max_tokens=9, seed=0, stop_token_ids=(probe.output[1],)))
    driver.schedule()
    driver.schedule()
    driver.schedule()
    driver.update()
    (output,) = driver.update()
    assert (output.finish_reason, output.stop_reason) == ("stop", probe.output[1])
    assert driver.update() == []
    assert a.output == probe.output
    assert driver.pager.used_pages == 0


def test_results_out_of_order_are_a_bug_that_is_seen() -> None:
    driver = Driver()
    driver.add("a", 5)
    driver.schedule()
    driver.schedule()
    driver.pending.rotate()
    with pytest.raises(EngineError, match="out of order"):
        driver.update()


def test_prompts_that_can_never_be_served_are_refused_with_their_field() -> None:
    """S-08 (a) and (d)."""
    driver = Driver(pages=20, page_tokens=16, context=512, waiting=1)
    with pytest.raises(PromptTooLong, match=r"400 tokens.*holds 320") as pool:
        driver.add("a", 400)
    with pytest.raises(PromptTooLong, match=r"513 tokens.*holds 512") as context:
        driver.add("b", 513)
    with pytest.raises(PromptTooLong, match="no room for output") as output:
        Driver(context=16).add("c", 16)
    with pytest.raises(PromptTooLong, match="chunked prefill is off"):
        Driver(budget=64, chunked=False).add("d", 100)
    with pytest.raises(RequestError, match="empty") as empty:
        driver.add("e", 0)
    assert [error.value.field for error in (pool, context, output, empty)] == [
        "prompt",
        "prompt",
        "max_tokens",
        "prompt",
    ]
    scoring = Driver(context=16)
    scoring.add("f", 16, params=SamplingParams(max_tokens=0, seed=0, prompt_logprobs=0))
    scoring.drain()
    driver.add("g", 5)
    with pytest.raises(TooManyRequests):
        driver.add("h", 5)
    assert not driver.scheduler.abort("h")


def test_ids_are_unique_among_the_living_and_children_have_their_parents_prompt() -> None:
    driver = Driver()
    driver.add("a", 5)
    with pytest.raises(RequestError, match="in use"):
        driver.add("a", 5)
    with pytest.raises(RequestError, match="prompt of its parent"):
        driver.add("b", 5, parent="a")
    driver.drain()
    driver.add("a", 5)
    driver.drain()


def test_all_pages_can_be_had_again_after_a_storm_of_aborts() -> None:
    """S-20: the pool can afterwards hold a request of its full size."""
    driver = Driver(pages=20, page_tokens=4, context=100, budget=16)
    for i in range(30):
        driver.add(f"r{i}", 6, output=60, parent=None)
    for _ in range(5):
        driver.step()
    for i in range(30):
        driver.scheduler.abort(f"r{i}")
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting, driver.pager.used_pages) == (0, 0, 0)
    whole = driver.add("whole", 78, output=3)
    driver.drain()
    assert (len(whole.output), whole.finish_reason) == (3, "length")


def test_rows_are_so_few_that_all_can_decode() -> None:
    assert SchedulerSettings(4, 9, 100).max_rows == 4
    assert SchedulerSettings(20, 9, 100, limits=StepLimits(prefill_chunk_multiple=16)).max_rows == 5
    assert SchedulerSettings(20, 9, 100, limits=StepLimits(max_requests=3)).max_rows == 3
    assert SchedulerSettings(64, 9, 100, limits=StepLimits(token_buckets=(8, 16), request_buckets=(2, 4))).max_rows == 4
    driver = Driver(budget=3, rows=8)
    for name in "abcd":
        driver.add(name, 1, output=5)
    assert batch(driver.step()) == [(0, 1), (1, 1), (2, 1)]
    driver.drain()


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"max_batch_tokens": 0}, "--max-batch-tokens"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"policy": "lottery"}, "--policy"),
        ({"limits": StepLimits(prefill_chunk_multiple=64)}, "--max-batch-tokens"),
    ],
)
def test_settings_that_cannot_be_name_their_flag(settings: dict[str, object], flag: str) -> None:
    good: dict[str, object] = {"max_batch_tokens": 16, "max_num_seqs": 4, "max_model_len": 50}
    with pytest.raises(ConfigError, match=flag):
        SchedulerSettings(**{**good, **settings})  # type: ignore[arg-type]


def test_a_request_from_a_message_and_its_states() -> None:
    message = EngineRequest(request_id="a", prompt=[1, 2], params=SamplingParams(eos_token_ids=(2,)), deadline=5.0)
    request = Request.from_message(message, 100.0)
    assert (request.arrival, request.deadline_at, request.stop_ids) == (100.0, 105.0, {2})
    assert request.tokens(0, 2).tolist() == [1, 2]
    request.output += [3, 4, 5]
    assert [request.tokens(a, b).tolist() for a, b in ((0, 5), (1, 3), (2, 4), (3, 5))] == [
        [1, 2, 3, 4, 5],
        [2, 3],
        [3, 4],
        [4, 5],
    ]
    request.move(Status.RUNNING)
    with pytest.raises(EngineError, match="running cannot become parked"):
        request.move(Status.PARKED)
