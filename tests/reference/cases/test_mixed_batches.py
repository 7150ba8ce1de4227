"""Requests of every kind in one batch: each equals its solo run, in the plain and in the overlapped loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_driver import Answer, Driver, assert_same

from hardpoint import SamplingParams

pytestmark = pytest.mark.reference

COUNT = 32


def _mixed(prompt_of: Any) -> list[tuple[list[int], SamplingParams]]:
    """32 requests; each kind meets every other over time."""
    draw = random.Random(17)
    requests = []
    for number in range(COUNT):
        kind: dict[str, Any] = {"temperature": 0.0, "max_tokens": draw.randint(1, 30)}
        if number % 2:
            kind |= {"temperature": draw.choice([0.5, 1.0, 1.5]), "seed": number}
        if number % 3 == 0:
            kind |= {"repetition_penalty": 1.3, "presence_penalty": draw.choice([-0.5, 1.0])}
        if number % 4 == 1:
            kind |= {"logprobs": draw.randint(0, 4)}
        if number % 5 == 2:
            kind |= {"min_tokens": kind["max_tokens"] // 2, "logit_bias": {1: 6.0}}
        if number % 5 == 3:
            kind |= {"stop_token_ids": tuple(draw.sample(range(300), 30))}
        if number % 7 == 4:
            kind |= {"top_k": 5, "top_p": 0.8, "min_p": 0.02}
        if number % 8 == 5:
            kind |= {"prompt_logprobs": 1}
        if number % 8 == 6:
            kind |= {"n": 3, "temperature": 1.0, "seed": number}
        if number % 9 == 7:
            kind |= {"stop": (" w1", "7"), "bad_words": (" w12", "w2")}
        if number % 10 == 8:
            kind |= {"allowed_token_ids": tuple(draw.sample(range(300), 40))}
        if number % 11 == 9:
            kind |= {"max_tokens": 0, "min_tokens": 0, "prompt_logprobs": 3}
        if number % 2 == 0:
            kind |= {"ignore_eos": True}
        length = draw.choice([1, 2, 15, 16, 17, 40, 64, 90])
        # every third shares a beginning with others
        prompt = prompt_of(length, seed=0 if number % 3 == 0 else number)
        requests.append((prompt, SamplingParams(**kind)))
    return requests


@pytest.fixture(scope="module")
def solo(device: str, tiny: Any, start: Any, prompt_of: Any) -> list[list[Answer]]:
    """Each alone, on the plain loop, without a prefix cache."""
    driver: Driver = start(tiny, device=device, overlap=False, prefix_caching=False)
    return [driver.ask(*request) for request in _mixed(prompt_of)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"budget": 40, "max_num_seqs": 12}, {"pages": 30, "page_tokens": 8, "budget": 64}], ids=str
)
def test_32_mixed_requests_equal_their_solo_runs(
    settings: dict[str, Any], overlap: bool, solo: Any, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    driver: Driver = start(tiny, device=device, overlap=overlap, **settings)
    requests = _mixed(prompt_of)
    crowd: list[list[Answer]] = []
    for prompt, params in requests:
        crowd.append(driver.submit(prompt, params))
        if len(crowd) > 20:  # the last ones come while others run
            driver.step()
    driver.run()
    for got, wanted in zip(crowd, solo, strict=True):
        for ours, theirs in zip(got, wanted, strict=True):
            assert_same(ours, theirs)
    assert driver.used_pages == 0
    if "pages" in settings and device != "strict":  # its prompts come one at a time and leave room
        assert driver.engine.stats().preemptions > 0


def test_the_solo_runs_are_of_every_kind(solo: Any, tiny: Any, oracle: Any, prompt_of: Any) -> None:
    """What they are compared with is worth something: all reasons, much text, and the greedy ones are the oracle's."""
    answers = [answer for several in solo for answer in several]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert any(isinstance(answer.stop_reason, str) for answer in answers)
    assert any(isinstance(answer.stop_reason, int) for answer in answers)
    assert sum(len(answer.token_ids) for answer in answers) > 300
    checked = 0
    for (prompt, params), several in zip(_mixed(prompt_of), solo, strict=True):
        simple = params.greedy and not (params.has_penalties or params.logit_bias or params.bad_words)
        if simple and params.allowed_token_ids is None:
            count = len(several[0].token_ids)
            assert several[0].token_ids == oracle(tiny).greedy(prompt, count)
            checked += count
    assert checked > 50
