"""Constraints that leave no token to draw: refused where some output leads there, and only there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import RequestError
from hardpoint.request.choice import check_choice
from hardpoint.request.sampling import SamplingParams
from hardpoint.request.validation import RequestLimits, validate

VOCAB = 3
BANNED_ALL = tuple((token,) for token in range(VOCAB))

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"allowed_token_ids": (2,), "min_tokens": 1, "eos_token_ids": (2,)}, "allowed_token_ids, min_tokens:"),
    ({"allowed_token_ids": (1, 2), "min_tokens": 1, "stop_token_ids": (1,), "eos_token_ids": (2,)}, "stop_token_ids"),
    ({"allowed_token_ids": (1,), "min_tokens": 3, "stop_token_ids": (1,)}, "allowed_token_ids, min_tokens, stop"),
    ({"min_tokens": 1, "stop_token_ids": (0, 1), "eos_token_ids": (2,)}, "min_tokens, stop_token_ids:"),
    ({"allowed_token_ids": (1,), "bad_words_ids": ((1,),)}, "allowed_token_ids, bad_words:"),
    ({"bad_words_ids": BANNED_ALL}, "bad_words:"),
    ({"allowed_token_ids": (1, 2), "bad_words_ids": ((1,),), "min_tokens": 2, "eos_token_ids": (2,)}, "bad_words"),
    ({"allowed_token_ids": (1,), "bad_words_ids": ((1, 1),)}, r"behind the tokens \[1\]"),
    ({"allowed_token_ids": (0, 1), "bad_words_ids": ((0, 0), (0, 1))}, r"behind the tokens \[0\]"),
    ({"allowed_token_ids": ()}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_refused_with_the_fields_names(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        check_choice(SamplingParams(**fields), VOCAB)
    assert refusal.value.status == 400
    assert refusal.value.field == next(name for name in refusal.value.message.split(":")[0].split(", "))
    with pytest.raises(RequestError):
        validate(SamplingParams(**fields), RequestLimits(vocab_size=VOCAB))


LEGAL: list[dict[str, Any]] = [
    {"allowed_token_ids": (2,), "eos_token_ids": (2,)},
    {"allowed_token_ids": (2,), "min_tokens": 9, "max_tokens": 9, "eos_token_ids": (2,), "ignore_eos": True},
    {"allowed_token_ids": (1, 2), "min_tokens": 9, "eos_token_ids": (2,)},
    {"logit_bias": dict.fromkeys(range(VOCAB), -100.0)},
    {"allowed_token_ids": (1,), "bad_words_ids": ((1, 1),), "max_tokens": 1},
    {"allowed_token_ids": (1,), "bad_words_ids": ((1, 1),), "stop_token_ids": (1,)},
    {"allowed_token_ids": (1, 2), "bad_words_ids": ((1, 1), (0, 2))},
    {"bad_words_ids": (*BANNED_ALL[:2], (VOCAB,))},
    {"allowed_token_ids": (2,), "min_tokens": 0, "max_tokens": 0, "prompt_logprobs": 0, "bad_words_ids": ((2,),)},
]


@pytest.mark.parametrize("fields", LEGAL, ids=str)
def test_what_leaves_a_token_passes(fields: dict[str, Any]) -> None:
    check_choice(SamplingParams(**fields), VOCAB)
    validate(SamplingParams(**fields), RequestLimits(vocab_size=VOCAB))


def test_an_unknown_vocabulary_hides_only_what_needs_it() -> None:
    check_choice(SamplingParams(bad_words_ids=BANNED_ALL), None)
    with pytest.raises(RequestError):
        check_choice(SamplingParams(allowed_token_ids=(1,), bad_words_ids=((1,),)), None)


def stuck(params: SamplingParams, output: tuple[int, ...] = ()) -> bool:
    """Whether this output, or one that goes on from it, has nothing to draw: by trying them all."""
    ends = {*params.stop_token_ids, *params.eos_token_ids}
    if len(output) >= (params.max_tokens or 0) or (output and output[-1] in ends):
        return False
    words = params.bad_words_ids
    masked = {word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1]} if output else set()
    masked |= {word[0] for word in words if len(word) == 1}
    masked |= ends if len(output) < params.min_tokens else set()
    allowed = range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids
    free = [token for token in allowed if token not in masked]
    return not free or any(stuck(params, (*output, token)) for token in free)


TOKENS = st.integers(0, VOCAB - 1)


@settings(max_examples=400, deadline=None)
@given(
    st.none() | st.sets(TOKENS, min_size=1).map(tuple),
    st.sets(TOKENS, max_size=2).map(tuple),
    st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=7).map(tuple),
    st.integers(0, 3),
)
def test_like_trying_every_output(
    allowed: tuple[int, ...] | None, ends: tuple[int, ...], words: tuple[tuple[int, ...], ...], least: int
) -> None:
    params = SamplingParams(
        allowed_token_ids=allowed, eos_token_ids=ends, bad_words_ids=words, min_tokens=least, max_tokens=5
    )
    try:
        check_choice(params, VOCAB)
    except RequestError:
        assert stuck(params)
    else:
        assert not stuck(params)
