"""Checks of what a caller may ask. Every refusal is a `RequestError` that names the field.

`validate` looks at the sampling parameters, `validate_prompt` at the token ids. Both are pure and quick: the server and
the offline interface call them before anything reaches the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hardpoint.errors import PromptTooLong, RequestError
from hardpoint.request.choice import check_choice
from hardpoint.request.sampling import SamplingParams

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
#: What crosses to the engine and stands in tables there has 64 bits.
COUNT_MAX = 2**63 - 1
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 10_000


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask of this server, model and device.

    Attributes:
        vocab_size: rows of the logits; token ids are below it. None skips these checks.
        max_model_len: longest sequence in tokens, prompt and output together. None skips these checks.
        max_logprobs: most top log-probabilities per position.
        max_n: most sequences per request.
        max_biased_tokens: most tokens that logit_bias, min_tokens and bad_words touch; None skips the check.
        max_stop_strings, max_stop_length: number of stop strings, and characters of each; the latter of bad words too.
    """

    vocab_size: int | None = None
    max_model_len: int | None = None
    max_logprobs: int = 20
    max_n: int = 128
    max_stop_strings: int = 16
    max_stop_length: int = 1024
    max_biased_tokens: int | None = None


def validate(params: SamplingParams, limits: RequestLimits) -> None:
    """Raise RequestError naming the first field of `params` that is out of range, or those that leave no token to draw.

    The latter is worth asking again (`check_choice`) of parameters that `hardpoint.frontend.requests.complete` has
    filled in.
    """
    _check_numbers(params)
    _check_counts(params, limits)
    _check_stops(params, limits)
    _check_token_sets(params, limits)
    _check_texts(params, limits)
    _check_biased(params, limits)
    check_choice(params, limits.vocab_size)


def check_priority(priority: int, policy: str) -> None:
    """Raise RequestError for a priority that the scheduler's policy would not look at."""
    if priority and policy != "priority":
        raise RequestError(
            f"priority is {priority}, but requests are served in the order of their arrival",
            field="priority",
            hint="leave it out, or start the server with --policy priority (LLM: policy='priority')",
        )


def check_unicode(value: object, field: str) -> None:
    """Raise RequestError for a text, in lists and objects too, with a lone surrogate: it has no UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{field} holds a lone surrogate (U+{ord(value[error.start]):04X}), which is no Unicode character",
                field=field,
            ) from None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_unicode(key, field)
            check_unicode(item, f"{field}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_unicode(item, f"{field}[{number}]")


def validate_prompt(prompt: Sequence[int], params: SamplingParams, limits: RequestLimits) -> None:
    """Raise RequestError for a prompt that is empty, too long or holds ids outside the vocabulary.

    At least one token must fit behind the prompt, unless none is asked for (max_tokens 0).
    """
    if not prompt:
        raise RequestError("the prompt is empty: it needs at least one token", field="prompt")
    if limits.vocab_size is not None:
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= limits.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(
                f"token id {bad} in the prompt is outside the vocabulary (0 to {limits.vocab_size - 1})",
                field="prompt",
            )
    if limits.max_model_len is not None:
        needed = len(prompt) + (0 if params.max_tokens == 0 else 1)
        if needed > limits.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, but prompt and output together may have at most "
                f"{limits.max_model_len}",
                field="prompt",
                hint="shorten the prompt, or start the server with a larger --max-model-len",
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(params: SamplingParams, field: str) -> float:
    """The field's value, or RequestError if it is no finite number."""
    value = getattr(params, field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{field} must be a number, got {value!r}", field=field)
    if not _is_finite(value):
        raise RequestError(f"{field} must be a finite number", field=field)
    return float(value)


def _is_finite(value: float) -> bool:
    """False too for an int that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _integer(params: SamplingParams, field: str, low: int, high: int | None = None) -> int:
    value = getattr(params, field)
    if not _is_int(value):
        raise RequestError(f"{field} must be an integer, got {value!r}", field=field)
    if value > COUNT_MAX:
        raise RequestError(f"{field} must be below 2**63", field=field)
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{field} must be {wanted}, got {value}", field=field)
    return int(value)


def _check_numbers(params: SamplingParams) -> None:
    """Temperature, top_p, min_p and penalties (R4, R5, R7 to R9)."""
    if _number(params, "temperature") < 0.0:
        raise RequestError(f"temperature must be 0 or above, got {params.temperature}", field="temperature")
    if not 0.0 < _number(params, "top_p") <= 1.0:
        raise RequestError(f"top_p must be above 0 and at most 1, got {params.top_p}", field="top_p")
    if not 0.0 <= _number(params, "min_p") <= 1.0:
        raise RequestError(f"min_p must be between 0 and 1, got {params.min_p}", field="min_p")
    for field in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= (value := _number(params, field)) <= 2.0:
            raise RequestError(f"{field} must be between -2 and 2, got {value}", field=field)
    if _number(params, "repetition_penalty") <= 0.0:
        raise RequestError(
            f"repetition_penalty must be above 0, got {params.repetition_penalty}", field="repetition_penalty"
        )


def _check_counts(params: SamplingParams, limits: RequestLimits) -> None:
    """n, top_k, seed, token counts and log-probabilities (R6, R10, R17 to R19)."""
    _integer(params, "n", 1, limits.max_n)
    _integer(params, "top_k", -1)
    if params.seed is not None:
        _integer(params, "seed", SEED_MIN, SEED_MAX)
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(params, field) is not None:
            _integer(params, field, 0, limits.max_logprobs)
    if params.max_tokens is not None:
        _integer(params, "max_tokens", 0)
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            raise RequestError(
                "max_tokens must be at least 1, unless only the prompt is scored (prompt_logprobs)",
                field="max_tokens",
            )
    _integer(params, "min_tokens", 0)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) must not be above max_tokens ({params.max_tokens})",
            field="min_tokens",
        )


def _check_stops(params: SamplingParams, limits: RequestLimits) -> None:
    """Stop strings (R12)."""
    if not isinstance(params.stop, tuple):
        raise RequestError("stop must be a string or a list of strings", field="stop")
    if len(params.stop) > limits.max_stop_strings:
        raise RequestError(
            f"stop has {len(params.stop)} strings, at most {limits.max_stop_strings} are allowed", field="stop"
        )
    for text in params.stop:
        if not isinstance(text, str):
            raise RequestError("stop must be a string or a list of strings", field="stop")
        if not text:
            raise RequestError("a stop string must not be empty", field="stop")
        check_unicode(text, "stop")
        if len(text) > limits.max_stop_length:
            raise RequestError(
                f"a stop string has {len(text)} characters, at most {limits.max_stop_length} are allowed",
                field="stop",
            )
    if params.stop and not params.detokenize:
        raise RequestError("stop strings need detokenize=true", field="stop")


def _check_ids(ids: object, field: str, limits: RequestLimits) -> None:
    # the lists may be long, and the event loop waits: nothing here goes through them in Python
    if not isinstance(ids, tuple) or not set(map(type, ids)) <= {int}:
        raise RequestError(f"{field} must be a list of token ids", field=field)
    if not ids:
        return
    vocab, low, high = limits.vocab_size, min(ids), max(ids)
    if low < 0 or (vocab is not None and high >= vocab):
        upper = "" if vocab is None else f" (0 to {vocab - 1})"
        bad = low if low < 0 else high
        raise RequestError(f"{field} holds {bad}, which is outside the vocabulary{upper}", field=field)
    if vocab is not None and len(ids) > vocab:
        raise RequestError(f"{field} holds {len(ids)} ids, more than the vocabulary has ({vocab})", field=field)


def _check_token_sets(params: SamplingParams, limits: RequestLimits) -> None:
    """stop_token_ids, allowed_token_ids and logit_bias (R13, R21, R22)."""
    _check_ids(params.stop_token_ids, "stop_token_ids", limits)
    # filled in by the front end, where a tokenizer may have more tokens than the model has rows
    _check_ids(params.eos_token_ids, "eos_token_ids", RequestLimits())
    if not isinstance(params.bad_words_ids, tuple) or not all(params.bad_words_ids):
        raise RequestError("bad_words_ids must be a tuple of tuples of token ids, none empty", field="bad_words_ids")
    for word in params.bad_words_ids:
        _check_ids(word, "bad_words_ids", RequestLimits())
    if params.allowed_token_ids is not None:
        _check_ids(params.allowed_token_ids, "allowed_token_ids", limits)
        if not params.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", field="allowed_token_ids")
    if params.logit_bias is None:
        return
    if not isinstance(params.logit_bias, dict):
        raise RequestError("logit_bias must be an object of token id to number", field="logit_bias")
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(params.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed", field="logit_bias"
        )
    for key, value in params.logit_bias.items():
        if not _is_int(key):
            raise RequestError(f"logit_bias has the key {key!r}; keys must be token ids", field="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise RequestError(f"logit_bias of token {key} must be a finite number", field="logit_bias")
    _check_ids(tuple(params.logit_bias), "logit_bias", limits)


def _check_biased(params: SamplingParams, limits: RequestLimits) -> None:
    """A step of fixed shape has room for so many biased tokens. A bad word counts twice: it has two spellings."""
    if limits.max_biased_tokens is None:
        return
    counts = {
        "logit_bias": len(params.logit_bias or ()),
        "stop_token_ids": len(params.stop_token_ids) + len(params.eos_token_ids) if params.min_tokens else 0,
        "bad_words": max(2 * len(params.bad_words), len(params.bad_words_ids)),
    }
    if sum(counts.values()) > limits.max_biased_tokens:
        told = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        raise RequestError(
            f"this device takes at most {limits.max_biased_tokens} biased tokens per request, there are {told}",
            field=max(counts, key=lambda name: counts[name]),
        )


def _check_texts(params: SamplingParams, limits: RequestLimits) -> None:
    """bad_words (R23) and the switches."""
    if not isinstance(params.bad_words, tuple) or not all(isinstance(w, str) for w in params.bad_words):
        raise RequestError("bad_words must be a list of strings", field="bad_words")
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(params.bad_words)} entries, at most {MAX_BAD_WORDS} are allowed",
            field="bad_words",
        )
    if any(not word.strip() for word in params.bad_words):
        raise RequestError("bad_words must not hold an empty word", field="bad_words")
    if (longest := max(map(len, params.bad_words), default=0)) > limits.max_stop_length:
        raise RequestError(
            f"bad_words holds a word of {longest} characters, at most {limits.max_stop_length} are allowed",
            field="bad_words",
        )
    for word in params.bad_words:
        check_unicode(word, "bad_words")
    for field in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
        if not isinstance(getattr(params, field), bool):
            raise RequestError(f"{field} must be true or false", field=field)
