"""From results to outputs: who ends and why, log-probabilities, bad values (cases S-03, S-04)."""

from __future__ import annotations

import numpy as np
import pytest
from driving import Driver

from hardpoint.bench.step import run
from hardpoint.engine.update import apply, ended
from hardpoint.errors import EngineError
from hardpoint.executor.null import NullExecutor
from hardpoint.request.request import Request
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import RowLogprobs, StepResult


def scripted(tokens: list[int], params: SamplingParams, prompt: int = 3) -> tuple[Driver, Request]:
    """A request that draws the given tokens."""
    driver = Driver()
    request = driver.add("a", prompt, params=params)
    for token in tokens:
        plan = driver.scheduler.schedule(1.0)
        if plan is None:
            break
        result = StepResult(plan.step, np.array([token if plan.samples[0] else -1], np.int64))
        driver.outputs["a"] += apply(driver.scheduler, plan, result, 2.0)
        driver.scheduler.check_integrity()
    return driver, request


@pytest.mark.parametrize("prompt", [2, 60])
@pytest.mark.parametrize(("least", "count"), [(0, 1), (1, 2), (4, 5)])
def test_stop_tokens_end_only_past_min_tokens(prompt: int, least: int, count: int) -> None:
    """S-03: counted over the output, whatever the prompt; a forced end at output index `min_tokens`."""
    params = SamplingParams(max_tokens=9, min_tokens=least, eos_token_ids=(2,), seed=0)
    _, request = scripted([2] * 9, params, prompt)
    assert (len(request.output), request.finish_reason, request.stop_reason) == (count, "stop", None)


def test_an_own_stop_token_is_the_stop_reason_and_works_with_ignore_eos() -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(7,), eos_token_ids=(2,), ignore_eos=True, seed=0)
    driver, request = scripted([2, 2, 7, 7], params)
    assert (request.output, request.finish_reason, request.stop_reason) == ([2, 2, 7], "stop", 7)
    assert [output.finish_reason for output in driver.outputs["a"]] == [None, None, "stop"]
    assert driver.outputs["a"][-1].stop_reason == 7


def test_an_end_token_that_is_also_a_stop_token_counts_as_the_end() -> None:
    _, request = scripted([2], SamplingParams(stop_token_ids=(2,), eos_token_ids=(2,), seed=0))
    assert (request.finish_reason, request.stop_reason) == ("stop", None)


def test_the_last_token_by_count_ends_by_length_unless_it_stops() -> None:
    assert scripted([5, 5, 5, 5], SamplingParams(max_tokens=3, seed=0))[1].finish_reason == "length"
    assert scripted([5, 5, 2], SamplingParams(max_tokens=3, eos_token_ids=(2,), seed=0))[1].finish_reason == "stop"


def test_first_and_last_outputs_carry_what_comes_once() -> None:
    driver, _ = scripted([5, 5, 5], SamplingParams(max_tokens=3, seed=0))
    outputs = driver.outputs["a"]
    assert [output.cached_tokens for output in outputs] == [0, None, None]
    assert [output.timing is not None for output in outputs] == [False, False, True]
    timing = outputs[-1].timing
    assert timing is not None
    assert (timing.queued, timing.prefill, timing.decode, timing.preemptions) == (1.0, 1.0, 0.0, 0)
    assert driver.scheduler.generated_tokens == 3
    assert driver.scheduler.prompt_tokens == 3


def test_scoring_a_prompt_draws_nothing() -> None:
    """S-04: max_tokens 0; entries for each prompt token over several chunks, once and whole."""
    driver = Driver(budget=4)
    driver.add("a", range(10, 21), params=SamplingParams(max_tokens=0, prompt_logprobs=2, seed=0))
    driver.drain()
    (output,) = driver.outputs["a"]
    assert (output.token_ids, output.finish_reason, output.cached_tokens) == ([], "length", 0)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [entry.token_ids for entry in output.prompt_logprobs[1:] if entry] == [
        [t, t + 1, t + 2] for t in range(11, 21)
    ]
    driver.add("one", [5], params=SamplingParams(max_tokens=0, prompt_logprobs=0, seed=0))
    driver.drain()
    assert driver.outputs["one"][0].prompt_logprobs == [None]


def test_prompt_logprobs_survive_a_preemption_in_the_middle() -> None:
    """S-22: no entry is lost, doubled or shifted, although chunks are computed twice."""
    driver = Driver(pages=8, page_tokens=4, budget=4, prefix_caching=False)
    first = driver.add("first", 3, output=26)
    driver.step()
    params = SamplingParams(max_tokens=3, prompt_logprobs=0, seed=0)
    scored = driver.add("scored", range(40, 62), params=params)
    while not scored.preemptions:
        driver.step()
    assert 0 < len(scored.prompt_logprobs) < 21
    driver.drain()
    assert first.finish_reason == "length"
    wholes = [output.prompt_logprobs for output in driver.outputs["scored"] if output.prompt_logprobs]
    assert len(wholes) == 1
    assert [entry.rank for entry in wholes[0][1:] if entry] == list(range(1, 22))
    assert driver.tokens("scored") == driver.alone(scored, 3)


def test_logprobs_come_with_their_tokens_and_are_cut_to_the_requests_own_number() -> None:
    driver = Driver()
    driver.add("a", 3, params=SamplingParams(max_tokens=3, logprobs=1, seed=0))
    driver.add("b", 3, params=SamplingParams(max_tokens=3, seed=0))
    driver.drain()
    entries = [entry for output in driver.outputs["a"] for entry in output.logprobs or ()]
    assert [entry.token_ids for entry in entries] == [[t, t + 1] for t in driver.tokens("a")]
    assert [entry.rank for entry in entries] == [3, 4, 5]
    assert all(output.logprobs is None for output in driver.outputs["b"])


def test_bad_values_end_their_request_and_nobody_elses() -> None:
    driver = Driver(poisoned=frozenset({"bad"}))
    driver.add("a", 3)
    bad = driver.add("bad", 3)
    driver.schedule()
    driver.schedule()
    driver.drain()
    (output,) = driver.outputs["bad"]
    assert (output.finish_reason, output.token_ids, bad.output) == ("error", [], [])
    assert "not finite" in (output.error or "")
    assert len(driver.tokens("a")) == 4


def test_the_end_of_an_aborted_request_can_be_told() -> None:
    driver = Driver()
    request = driver.add("a", 3)
    driver.scheduler.abort("a")
    output = ended(request)
    assert (output.finish_reason, output.token_ids, output.timing is not None) == ("abort", [], True)


def test_results_that_do_not_fit_are_bugs_that_are_seen() -> None:
    driver = Driver()
    driver.add("a", 3, params=SamplingParams(logprobs=0, prompt_logprobs=0, seed=0))
    plan = driver.scheduler.schedule(1.0)
    assert plan is not None
    with pytest.raises(EngineError, match="does not fit"):
        apply(driver.scheduler, plan, StepResult(plan.step + 1, np.array([1])), 1.0)
    with pytest.raises(EngineError, match="no log-probabilities"):
        apply(driver.scheduler, plan, StepResult(plan.step, np.array([1])), 1.0)
    driver = Driver(budget=4)
    driver.add("a", 8, params=SamplingParams(prompt_logprobs=0, seed=0))
    plan = driver.scheduler.schedule(1.0)
    assert plan is not None
    apply(driver.scheduler, plan, StepResult(plan.step, np.array([-1])), 1.0)
    plan = driver.scheduler.schedule(1.0)
    assert plan is not None
    late = RowLogprobs(np.zeros((3, 1), np.int64), np.zeros((3, 1), np.float32), np.ones(3, np.int64))
    with pytest.raises(EngineError, match=r"positions 1..4 are missing"):
        apply(driver.scheduler, plan, StepResult(plan.step, np.array([9]), prompt_logprobs={0: late}), 1.0)


def test_the_null_executor_draws_for_rows_that_sample() -> None:
    driver = Driver(budget=4)
    driver.add("a", 6)
    executor = NullExecutor(5)
    for expected in (-1, 6 % 5):
        plan = driver.scheduler.schedule(1.0)
        assert plan is not None
        handle = executor.submit(plan)
        assert handle.done()
        assert handle.result().tokens.tolist() == [expected]
        apply(driver.scheduler, plan, handle.result(), 1.0)
    executor.close()


def test_the_step_bench_keeps_its_crowd_and_uses_the_cache() -> None:
    cost = run(4, steps=60, warmup=20, prompt_tokens=40, output_tokens=10, max_batch_tokens=48, page_tokens=4)
    assert (cost.requests, cost.steps, cost.preemptions) == (4, 60, 0)
    assert cost.tokens_per_step > 4
    assert 0 < cost.decode_steps < 60
    assert 0.3 < cost.prefix_hit_share < 0.6
    assert 0 < cost.total.median <= cost.total.p90 <= cost.total.p99
