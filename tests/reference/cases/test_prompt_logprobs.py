"""Prompt log-probabilities under a prefix cache, chunks, preemption and neighbours (case S-22)."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import Answer, Driver, assert_same_logprobs

from hardpoint import SamplingParams

pytestmark = pytest.mark.reference

LENGTH = 90


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 4, "prompt_logprobs": 2, "ignore_eos": True} | changes))


@pytest.fixture(scope="module")
def check(tiny: Any, oracle: Any, prompt_of: Any) -> Any:
    """Compare an answer's prompt scores with transformers, and its ids."""
    ids = prompt_of(LENGTH)
    rows = oracle(tiny).logprobs(ids)
    greedy = oracle(tiny).greedy(ids, 4)

    def check(answer: Answer, output: bool = True) -> None:
        scores = answer.prompt_logprobs
        assert scores is not None
        assert len(scores) == LENGTH
        assert scores[0] is None
        for position in range(1, LENGTH):
            entry, row = scores[position], rows[position - 1]
            assert entry is not None
            best = row.topk(2)
            assert set(entry) == {ids[position], *best.indices.tolist()}
            for token, item in entry.items():
                assert abs(item.logprob - row[token].item()) < 1e-4
        if output:
            assert answer.token_ids == greedy

    return check


@pytest.mark.parametrize("budget", [None, 16, 7])
def test_cold_repeated_and_partly_cached(
    budget: int | None, overlap: bool, device: str, tiny: Any, start: Any, prompt_of: Any, check: Any
) -> None:
    driver: Driver = start(tiny, device=device, overlap=overlap, budget=budget, max_num_seqs=4)
    ids = prompt_of(LENGTH)
    cold = driver.ask_one(ids, _params())
    check(cold)
    check(driver.ask_one(ids, _params()))
    check(driver.ask_one(ids, _params(max_tokens=0)), output=False)
    # a plain request does use what the scored one cached, and the other way round
    assert driver.ask_one(ids, _params(prompt_logprobs=None)).cached_tokens == 80
    driver.cold()
    driver.ask_one([*ids[:40], *prompt_of(30, 1)], _params(prompt_logprobs=None))
    check(driver.ask_one(ids, _params()))
    narrow = driver.ask_one(ids, _params(prompt_logprobs=0))
    assert cold.prompt_logprobs is not None
    drawn = [None if e is None else {token: e[token]} for token, e in zip(ids, cold.prompt_logprobs, strict=True)]
    assert_same_logprobs(narrow.prompt_logprobs or [], drawn)


def test_beside_neighbours(device: str, tiny: Any, start: Any, prompt_of: Any, check: Any) -> None:
    driver: Driver = start(tiny, device=device, budget=16, max_num_seqs=8)
    ids = prompt_of(LENGTH)
    neighbour = driver.ask_one(prompt_of(12), _params(prompt_logprobs=None, max_tokens=60))
    (beside,) = driver.submit(prompt_of(12), _params(prompt_logprobs=None, max_tokens=60))
    for _ in range(5):
        driver.step()
    several = driver.submit(ids, _params()) + driver.submit(ids, _params(max_tokens=0)) + driver.submit(ids, _params())
    driver.run()
    for number, answer in enumerate(several):
        check(answer, output=number != 1)
    assert beside.token_ids == neighbour.token_ids


def test_preempted_in_the_middle_of_the_prompt(
    overlap: bool, device: str, tiny: Any, start: Any, prompt_of: Any, check: Any
) -> None:
    ids, scored = prompt_of(LENGTH), set()
    for steps in range(1, 9):
        driver: Driver = start(tiny, device=device, overlap=overlap, budget=16, pages=8, policy="priority")
        (answer,) = driver.submit(ids, _params(), priority=5, name="scored")
        for _ in range(steps):
            driver.step()
        (request,) = driver.scheduler.requests.values()
        (urgent,) = driver.submit(prompt_of(100, 1), _params(prompt_logprobs=None), priority=0)
        for _ in range(2):
            driver.step()
        assert request.preemptions == 1, "the urgent one starts at once"
        scored.add(len(request.prompt_logprobs))
        driver.run()
        check(answer)
        assert len(urgent.token_ids) == 4
    assert {16, 32, 48, 64, 80} <= scored


def test_preempted_by_growing_neighbours(device: str, tiny: Any, start: Any, prompt_of: Any, check: Any) -> None:
    """The same under fcfs: those that came before it grow and take its pages."""
    ids, preempted = prompt_of(LENGTH), 0
    for pages in range(24, 34, 2):
        driver: Driver = start(tiny, device=device, budget=12, pages=pages, page_tokens=8, max_num_seqs=8)
        before = [driver.submit(prompt_of(10 + n), _params(prompt_logprobs=None, max_tokens=40))[0] for n in range(6)]
        (answer,) = driver.submit(ids, _params())
        driver.run()
        check(answer)
        assert all(len(other.token_ids) == 40 for other in before)
        preempted += answer.preemptions
    assert preempted > 0 or device == "strict"  # its chunks are larger, so that prompts are done before they must go
