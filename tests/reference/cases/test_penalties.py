"""Penalties see the whole history, however the tokens came into the cache (case S-06)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_driver import Answer, assert_same

from hardpoint import SamplingParams

pytestmark = pytest.mark.reference

PENALTIES = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 1.3, "frequency_penalty": -0.7, "presence_penalty": 0.9},
]


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 20, "logprobs": 5, "ignore_eos": True} | changes))


def _expected(oracle: Any, prompt: list[int], count: int, penalties: dict[str, float]) -> list[int]:
    """Greedy by the definition of the penalties, on transformers' logits."""
    output: list[int] = []
    for _ in range(count):
        logits = oracle.logits(prompt + output)[-1]
        seen = torch.tensor(sorted({*prompt, *output}))
        factor = penalties.get("repetition_penalty", 1.0)
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
        times = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(logits))
        logits -= penalties.get("frequency_penalty", 0.0) * times
        logits -= penalties.get("presence_penalty", 0.0) * (times > 0)
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_are_those_of_the_definition(
    penalties: dict[str, float], device: str, tiny: Any, start: Any, oracle: Any, prompt_of: Any
) -> None:
    driver, prompt = start(tiny, device=device), prompt_of(70)
    plain = driver.ask_one(prompt, _params())
    answer = driver.ask_one(prompt, _params(**penalties))
    assert answer.token_ids != plain.token_ids
    assert answer.token_ids == _expected(oracle(tiny), prompt, 20, penalties)
    # log-probabilities are those of the model, not of the penalized logits
    rows = oracle(tiny).logprobs(prompt + answer.token_ids)[len(prompt) - 1 : -1]
    for entry, token, row in zip(answer.logprobs, answer.token_ids, rows, strict=True):
        assert abs(entry[token].logprob - row[token].item()) < 1e-4


def test_no_way_into_the_cache_changes_them(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    prompt, short = prompt_of(70), prompt_of(3)
    params, other = _params(repetition_penalty=1.8), _params(frequency_penalty=1.0)
    driver = start(tiny, device=device)
    cold = driver.ask_one(prompt, params)
    alone = driver.ask_one(short, other)
    hit = driver.ask_one(prompt, params)
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 64)
    assert_same(hit, cold)
    (long,), (brief,) = driver.submit(prompt, params), driver.submit(short, other)
    driver.run()
    assert_same(long, cold)
    assert_same(brief, alone)
    for settings in ({"prefix_caching": False}, {"budget": 16}, {"overlap": False}, {"page_tokens": 8}):
        assert_same(start(tiny, device=device, **settings).ask_one(prompt, params), cold)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_histories_of_a_batch_do_not_mix(
    temperature: float, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    """Unlike lengths, with and without penalties: padding counts for nobody."""
    driver = start(tiny, device=device)
    cases = [
        (prompt_of(length, seed=5), _params(temperature=temperature, seed=length, **penalties))
        for length, penalties in zip((3, 70, 17, 1, 33, 50, 9), [{}, *PENALTIES], strict=True)
    ]
    alone: list[Answer] = [driver.cold().ask_one(*case) for case in cases]
    together = [driver.submit(*case)[0] for case in cases]
    driver.run()
    for got, wanted in zip(together, alone, strict=True):
        assert_same(got, wanted)
