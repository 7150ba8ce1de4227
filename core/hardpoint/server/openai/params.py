"""From request fields to `SamplingParams`: the one place where HTTP's names and rules meet the engine's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hardpoint.errors import PromptTooLong, RequestError
from hardpoint.request.sampling import SamplingParams
from hardpoint.request.validation import MAX_LOGIT_BIAS, RequestLimits, validate, validate_prompt
from hardpoint.server.openai.schemas import LATER, ChatRequest, CompletionRequest, SamplingFields

MAX_TEMPERATURE = 2.0
#: What /v1/completions generates when it is not told.
COMPLETION_MAX_TOKENS = 16

_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
#: Fields that mean the same in SamplingParams.
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "include_stop_str_in_output", "ignore_eos", "min_tokens", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
_TUPLES = ("stop_token_ids", "allowed_token_ids", "bad_words")


def refuse_unsupported(body: SamplingFields) -> None:
    """Raise RequestError for what this server cannot do yet and must not ignore."""
    for field in LATER:
        value = getattr(body, field)
        if value is not None and value is not False:
            raise not_yet(field)
    if body.response_format is not None:
        kind = body.response_format.get("type") if isinstance(body.response_format, dict) else None
        if not isinstance(kind, str):
            raise RequestError("response_format must be an object with a type.", field="response_format")
        if kind != "text":
            raise not_yet("response_format", f"response_format of type {kind[:40]!r}")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options may be given only with stream=true.", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs cannot be streamed; leave stream out.", field="prompt_logprobs")
    if isinstance(body, CompletionRequest):
        _refuse_in_completion(body)
    elif isinstance(body, ChatRequest):
        _refuse_in_chat(body)


def not_yet(field: str, what: str | None = None) -> RequestError:
    """The refusal of a known feature that is not there."""
    return RequestError(f"{what or field} is not supported yet by this server; leave it out.", field=field)


def _refuse_in_completion(body: CompletionRequest) -> None:
    if body.suffix:
        raise RequestError("suffix is not supported; put the whole text into prompt.", field="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of is not supported unless it equals n; leave it out.", field="best_of")


def _refuse_in_chat(body: ChatRequest) -> None:
    if body.modalities is not None and any(kind != "text" for kind in body.modalities):
        raise not_yet("modalities", "A modality other than text")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true.", field="top_logprobs")


def sampling_params(body: SamplingFields, limits: RequestLimits, defaults: Mapping[str, float]) -> SamplingParams:
    """Checked parameters; max_tokens stays as asked until the prompt's length is known (`fit_to_context`).

    defaults: the model's own, for fields that the request leaves out.

    Raises RequestError naming the field as the request spells it.
    """
    refuse_unsupported(body)
    values: dict[str, Any] = dict(defaults)
    values |= {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    for name in _TUPLES:
        if (ids := getattr(body, name)) is not None:
            values[name] = tuple(ids)
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    if body.temperature is not None and body.temperature > MAX_TEMPERATURE:
        raise RequestError(
            f"temperature must be between 0 and {MAX_TEMPERATURE:g}, got {body.temperature:g}.", field="temperature"
        )
    names: dict[str, str] = {}
    if isinstance(body, ChatRequest):
        _chat_values(body, values, names)
    elif isinstance(body, CompletionRequest):
        _completion_values(body, values)
    try:
        params = SamplingParams(**values)
        # A score without log-probabilities never reaches the engine, so it is checked as if it generated.
        scored = params.max_tokens == 0 and params.prompt_logprobs is None and isinstance(body, CompletionRequest)
        validate(SamplingParams(**{**values, "max_tokens": None}) if scored else params, limits)
    except RequestError as exc:
        raise _renamed(exc, names) from None
    if params.max_tokens == 0:
        _check_scoring(body, params)
    return params


def _chat_values(body: ChatRequest, values: dict[str, Any], names: dict[str, str]) -> None:
    values["max_tokens"] = body.max_tokens
    if body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    names["logprobs"] = "top_logprobs"
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs < 0:
        raise RequestError("top_logprobs must not be negative.", field="top_logprobs")


def _completion_values(body: CompletionRequest, values: dict[str, Any]) -> None:
    if body.max_tokens is not None:
        values["max_tokens"] = body.max_tokens
    elif body.min_tokens is not None:
        values["max_tokens"] = max(COMPLETION_MAX_TOKENS, body.min_tokens)
    if body.logprobs is not None:
        values["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            values["prompt_logprobs"] = body.logprobs


def _check_scoring(body: SamplingFields, params: SamplingParams) -> None:
    """max_tokens 0 makes sense where the prompt is what is asked about."""
    if not isinstance(body, CompletionRequest):
        raise RequestError("max_tokens must be at least 1.", field="max_tokens")
    if not body.echo and params.prompt_logprobs is None:
        raise RequestError("max_tokens must be at least 1, or 0 with echo=true (scoring).", field="max_tokens")
    if params.n != 1:
        raise RequestError("n must be 1 with max_tokens=0: every choice would be the prompt.", field="n")


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(given)} entries, at most {MAX_LOGIT_BIAS} are allowed.", field="logit_bias"
        )
    bias: dict[int, float] = {}
    for key, value in given.items():
        if _TOKEN_ID.fullmatch(key) is None:
            raise RequestError(f"logit_bias has the key {key[:40]!r}; keys must be token ids.", field="logit_bias")
        bias[int(key)] = min(max(value, -100.0), 100.0)
    return bias


def _renamed(exc: RequestError, names: dict[str, str]) -> RequestError:
    """The same error with the request's own field name."""
    new = names.get(exc.field or "")
    if new is not None and exc.field is not None:
        exc.message = re.sub(rf"\b{exc.field}\b", new, exc.message)
        exc.field = new
    return exc


def fit_to_context(
    params: SamplingParams, prompt: list[int], asked: int | None, limits: RequestLimits, fields: tuple[str, str]
) -> int:
    """Check a prompt against the context and return how many tokens may be generated.

    asked: max_tokens of the request, None if it was not given. fields: the request's names of (prompt, max_tokens).
    Raises RequestError, PromptTooLong.
    """
    try:
        validate_prompt(prompt, params, limits)
    except RequestError as exc:
        exc.field = fields[0]
        raise
    longest = limits.max_model_len
    assert longest is not None  # set by the service
    left = longest - len(prompt)
    if asked is not None and asked > left:
        raise PromptTooLong(
            f"The context of this model is {longest} tokens; the prompt has {len(prompt)}, which leaves {left}, but "
            f"{fields[1]} asks for {asked}.",
            field=fields[1],
        )
    if asked is not None:
        return asked
    default = left if params.max_tokens is None else min(params.max_tokens, left)
    if default < params.min_tokens:
        raise PromptTooLong(
            f"min_tokens asks for {params.min_tokens} tokens, but the prompt of {len(prompt)} leaves {left} "
            f"of {longest}.",
            field="min_tokens",
        )
    return default
