"""Every range of the sampling parameters (features R4 to R23, cases S-03, S-07, S-41)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hardpoint.errors import PromptTooLong, RequestError
from hardpoint.request.sampling import SamplingParams
from hardpoint.request.validation import RequestLimits, check_priority, check_unicode, validate, validate_prompt

LIMITS = RequestLimits(vocab_size=100, max_model_len=32)
HUGE = 10**400

BAD: list[tuple[str, Any]] = [
    *[("temperature", v) for v in (math.nan, math.inf, -math.inf, -0.1, "0.7", True, None, HUGE, [])],
    *[("top_p", v) for v in (0, 1.5, math.nan, -1, "1", False)],
    *[("min_p", v) for v in (math.nan, -0.1, 1.1)],
    *[("presence_penalty", v) for v in (1e308, 2.1, -2.1, math.nan)],
    *[("frequency_penalty", v) for v in (-2.5, math.inf)],
    *[("repetition_penalty", v) for v in (0, -1, math.nan)],
    *[("top_k", v) for v in (-2, 1.5, True)],
    *[("n", v) for v in (0, -1, 129, 1_000_000, 1.0)],
    *[("seed", v) for v in (2**63, -(2**63) - 1, 1.5, "7")],
    *[("max_tokens", v) for v in (0, -1, 1.5)],
    *[("min_tokens", v) for v in (-1, 17, "3")],
    *[("logprobs", v) for v in (-1, 21, True)],
    *[("prompt_logprobs", v) for v in (-1, 21)],
    *[("stop", v) for v in ("", ["a", ""], ["x"] * 17, "y" * 1025, [3], 5)],
    *[("stop_token_ids", v) for v in ([100], [-1], ["3"], 3, [5] * 101)],
    *[("allowed_token_ids", v) for v in ([], [100], [True], [5] * 101)],
    *[("logit_bias", v) for v in ({"505": 1.0}, {"x": 1.0}, {-1: 1.0}, {3: math.nan}, {3: "1"}, [3])],
    ("logit_bias", dict.fromkeys(range(10_001), 1.0)),
    *[("bad_words", v) for v in ([""], [" "], [3], ["a"] * 129, ["w" * 1025], ["a", "x\udfff"])],
    *[("bad_words_ids", v) for v in (((),), [[1]], ((1.5,),), ((-1,),), (3,))],
    *[("eos_token_ids", v) for v in ((-1,), [2], ("2",))],
    *[("stop", v) for v in ("\ud800", ["a", "\udc00x"])],
    ("ignore_eos", 1),
    ("detokenize", "no"),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda v: str(v)[:20])
def test_refusals_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        validate(SamplingParams(**{field: value}), LIMITS)
    assert refusal.value.field == field
    assert field in refusal.value.message
    assert "NaN" not in refusal.value.message


GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 1e-9},
    {"temperature": 0},
    {"temperature": 50},
    {"top_k": -1},
    {"top_k": 10**9},
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"max_tokens": 0, "prompt_logprobs": 0},
    {"max_tokens": None, "min_tokens": 10},
    {"min_tokens": 16},
    {"stop": "a"},
    {"stop": ["a", "b"]},
    {"stop": None},
    {"logit_bias": {"99": 100, 0: -100.0}},
    {"allowed_token_ids": [0, 99]},
    {"bad_words": ["no"]},
    {"temperature": 0, "n": 3},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_legal_values_pass(fields: dict[str, Any]) -> None:
    validate(SamplingParams(**fields), LIMITS)


def test_what_callers_give_becomes_tuples() -> None:
    params = SamplingParams(stop="x", bad_words=["y"], stop_token_ids=[1], allowed_token_ids=[2], logit_bias={"3": 1.0})  # type: ignore[arg-type]
    assert (params.stop, params.bad_words) == (("x",), ("y",))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((1,), (2,))
    assert params.logit_bias == {3: 1.0}


def test_seed_minus_one_draws_and_zero_does_not() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=0).seed == 0


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("a\ud800", "x"),
        (["a", "\udfff"], "x[1]"),
        ({"a": {"b": ["\ud83e", 1]}}, "x.a.b[0]"),
        ({"\ud83e": 1}, "x"),
        ([{"content": ("ok", "\udd9c\ud83e")}], "x[0].content[1]"),
    ],
)
def test_lone_surrogates_are_refused_wherever_they_hide(value: object, field: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate") as refusal:
        check_unicode(value, "x")
    assert refusal.value.field == field
    refusal.value.message.encode()


def test_other_values_have_no_surrogates() -> None:
    for value in ("", "🦜 \uffff \0", None, 5, [1, {"a": None}], b"\xff"):
        check_unicode(value, "x")


def test_a_priority_needs_a_policy_that_looks_at_it() -> None:
    check_priority(0, "fcfs")
    check_priority(-3, "priority")
    for priority in (1, -1):
        with pytest.raises(RequestError, match="--policy priority") as refusal:
            check_priority(priority, "fcfs")
        assert (refusal.value.field, refusal.value.status) == ("priority", 400)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError):
        validate(SamplingParams(stop=("a",), detokenize=False), LIMITS)


def test_prompt() -> None:
    params = SamplingParams()
    validate_prompt(list(range(31)), params, LIMITS)
    validate_prompt([1] * 32, SamplingParams(max_tokens=0, prompt_logprobs=0), LIMITS)
    with pytest.raises(PromptTooLong):
        validate_prompt([1] * 32, params, LIMITS)
    for prompt in ([], [100], [-1]):
        with pytest.raises(RequestError) as refusal:
            validate_prompt(prompt, params, LIMITS)
        assert refusal.value.field == "prompt"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": dict.fromkeys(range(9), 1.0)}, "logit_bias"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(9))}, "stop_token_ids"),
        ({"bad_words": ("a", "b", "c", "d", "e")}, "bad_words"),
        ({"logit_bias": dict.fromkeys(range(5), 1.0), "bad_words": ("a", "b")}, "logit_bias"),
    ],
)
def test_fixed_shapes_have_room_for_so_many_biased_tokens(fields: dict[str, Any], named: str) -> None:
    params = SamplingParams(**fields)
    validate(params, RequestLimits(vocab_size=100, max_biased_tokens=10 if len(fields) == 1 else 9))
    with pytest.raises(RequestError, match="at most 8 biased tokens per request") as seen:
        validate(params, RequestLimits(vocab_size=100, max_biased_tokens=8))
    assert seen.value.field == named
