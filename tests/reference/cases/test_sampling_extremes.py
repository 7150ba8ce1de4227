"""Legal extremes of sampling values: never a crash, never NaN, never an effect on neighbours (case S-07)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from engine_driver import assert_same

from hardpoint import LLM, SamplingParams
from hardpoint.errors import RequestError

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("error::RuntimeWarning")]


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "logprobs": 2, "ignore_eos": True} | changes))


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-9, 1e-30, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float, device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver, ids = start(tiny, device=device), prompt_of(30)
    greedy = driver.ask_one(ids, _params())
    assert_same(driver.ask_one(ids, _params(temperature=temperature, seed=1)), greedy)
    # with something to filter, and with something else in the batch
    (cold,), (hot,) = (
        driver.submit(ids, _params(temperature=temperature, top_p=0.9, top_k=50, min_p=0.01, seed=1)),
        driver.submit(ids, _params(temperature=1.5, seed=1)),
    )
    driver.run()
    assert_same(cold, greedy)
    assert hot.token_ids != greedy.token_ids


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 10**6},
        {"top_k": 2**31},
        {"top_k": 2**63 - 1},
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1.0},
        {"min_p": 0.0},
    ],
    ids=str,
)
def test_filters_that_keep_everything(
    changes: dict[str, Any], device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    driver, ids = start(tiny, device=device), prompt_of(30)
    plain = driver.ask_one(ids, _params(temperature=1.0, seed=9))
    assert_same(driver.ask_one(ids, _params(temperature=1.0, seed=9, **changes)), plain)


@pytest.mark.parametrize(
    "changes", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 5e-324}, {"min_p": 1.0}, {"top_p": 1e-3, "top_k": 2}], ids=str
)
def test_filters_that_keep_the_best_alone(
    changes: dict[str, Any], device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    driver, ids = start(tiny, device=device), prompt_of(30)
    greedy = driver.ask_one(ids, _params())
    assert_same(driver.ask_one(ids, _params(temperature=1.0, seed=9, **changes)), greedy)


HOSTILE: list[dict[str, Any]] = [
    {"temperature": 1e30},
    {"temperature": 1.7e308},
    {"temperature": 1.7e308, "allowed_token_ids": (3, 4, 5)},
    {"temperature": 1e39, "min_tokens": 12, "ignore_eos": False},
    {"repetition_penalty": 1.7e308},
    {"repetition_penalty": 1e39, "temperature": 1.0},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e-46, "temperature": 1.0, "presence_penalty": 2.0},
    {"logit_bias": {7: 1.7e308}},
    {"logit_bias": {7: 1e39, 8: 1e39}, "temperature": 1.0},
    {"logit_bias": {7: -1.7e308}},
    {"logit_bias": dict.fromkeys(range(300), -1.7e308), "temperature": 1.0},
    {"logit_bias": dict.fromkeys(range(300), -100.0), "temperature": 1.0},
    {"allowed_token_ids": (299,), "logit_bias": {299: -1e300}},
    {"top_p": 5e-324, "min_p": 1.0, "top_k": 1, "temperature": 1.7e308},
]


@pytest.fixture(scope="module")
def neighbours(device: str, tiny: Any, start: Any, prompt_of: Any) -> list[Any]:
    """(prompt, parameters, answer alone), one greedy and one drawn."""
    requests = [
        (prompt_of(25), _params(max_tokens=16)),
        (prompt_of(26), _params(max_tokens=16, temperature=1.0, seed=4, repetition_penalty=1.2)),
    ]
    return [(*request, start(tiny, device=device).ask_one(*request)) for request in requests]


@pytest.mark.parametrize("changes", HOSTILE, ids=lambda changes: str(changes)[:60])
def test_hostile_values_stay_with_their_request(
    changes: dict[str, Any], neighbours: Any, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    driver = start(tiny, device=device)
    beside = [driver.submit(prompt, params)[0] for prompt, params, _ in neighbours]
    (hostile,) = driver.submit(prompt_of(27), _params(seed=1, **changes))
    driver.run()
    for got, (_, _, alone) in zip(beside, neighbours, strict=True):
        assert_same(got, alone)
    assert hostile.finish_reason == "length"
    assert len(hostile.token_ids) == 12
    allowed = changes.get("allowed_token_ids", range(300))
    assert all(token in allowed for token in hostile.token_ids)
    if changes.get("temperature", 0.0) > 1e20 and "top_k" not in changes:
        assert len(set(hostile.token_ids)) > 1  # as good as uniform, not greedy
    assert all(math.isfinite(item.logprob) for entry in hostile.logprobs for item in entry.values())


def test_a_bias_is_clamped(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    """The documented range is [-100, 100]; more means the same."""
    driver, ids = start(tiny, device=device), prompt_of(30)
    pair = {7: 1e30, 8: 100.0}
    clamped = driver.ask_one(ids, _params(logit_bias={7: 100.0, 8: 100.0}, temperature=3.0, seed=1))
    assert len(set(clamped.token_ids)) == 2  # both are drawn
    assert_same(driver.ask_one(ids, _params(logit_bias=pair, temperature=3.0, seed=1)), clamped)


@pytest.fixture(scope="module")
def offline(tiny: Any) -> Iterator[LLM]:
    with LLM(str(tiny), device="reference", dtype="float32", num_kv_pages=64) as llm:
        yield llm


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": -0.1},
        {"temperature": "0.7"},
        {"temperature": True},
        {"temperature": 10**400},
        {"top_p": 0.0},
        {"top_p": math.nan},
        {"min_p": math.nan},
        {"presence_penalty": 1e308},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"top_k": -2},
        {"top_k": 1.5},
        {"top_k": 2**63},
        {"top_k": 10**40},
        {"max_tokens": 10**40},
        {"min_tokens": 10**40, "max_tokens": None},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {3: 10**400}},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_values_out_of_range_never_reach_the_engine(changes: dict[str, Any], offline: LLM, prompt_of: Any) -> None:
    good = [prompt_of(4)] * 2
    with pytest.raises(RequestError) as caught:
        offline.generate(good, [_params(), _params(**changes)], use_tqdm=False)
    assert caught.value.field == next(iter(changes))
    assert str(caught.value).isprintable()
    assert len(offline.generate(good, _params(max_tokens=1), use_tqdm=False)) == 2
