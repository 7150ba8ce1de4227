"""`SamplingParams`: how the tokens of one request are chosen, and when it ends."""

from __future__ import annotations

from typing import Any

import msgspec


def _as_tuple(value: Any) -> Any:
    """A tuple of what callers give for one; what cannot be is left for `validate` to refuse."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | set | frozenset) else value


def _as_token_id(key: Any) -> Any:
    """JSON objects have string keys."""
    if isinstance(key, str):
        digits = key.strip()
        if digits.isascii() and digits.isdecimal() and len(digits) < 10:
            return int(digits)
    return key


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample one request. Immutable; checked by `validate` (`hardpoint.request.validation`).

    Field meanings and defaults are those of vLLM's SamplingParams, so that scripts move over unchanged. Where a tuple
    stands a list is taken too, for `stop` and `bad_words` also one string, and None means none.

    Attributes:
        n: sequences to return, all from one prompt.
        temperature: 0 is greedy. Below 1e-5 counts as 0.
        top_p: in (0, 1]; 1 is off.
        top_k: 0 or -1 is off.
        min_p: in [0, 1]; 0 is off.
        presence_penalty, frequency_penalty: in [-2, 2], over the output only.
        repetition_penalty: above 0, over prompt and output; 1 is off.
        seed: signed 64-bit; None or -1 draws one.
        stop: strings that end the output, looked for once `min_tokens` exist; not part of the text unless
            `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output.
        ignore_eos: go on past the end-of-sequence token.
        max_tokens: None means as far as the context goes. 0 is legal with prompt_logprobs (scoring).
        min_tokens: end-of-sequence and stop tokens cannot be drawn before this many tokens.
        logprobs: top log-probabilities per output token; None for none, 0 for the drawn token's only.
        prompt_logprobs: likewise per prompt token.
        logit_bias: token id to addition, clamped to [-100, 100].
        allowed_token_ids: only these may be drawn.
        bad_words: texts that may not be produced.
        bad_words_ids: the same as token sequences (made by the front end).
        detokenize: False leaves text empty.
        skip_special_tokens, spaces_between_special_tokens: for the text.
        eos_token_ids: end-of-sequence tokens of the model (filled in by the front end).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            if not isinstance(value := getattr(self, name), tuple):
                msgspec.structs.force_setattr(self, name, _as_tuple(value))
        allowed: Any = self.allowed_token_ids
        if allowed is not None and not isinstance(allowed, tuple):
            msgspec.structs.force_setattr(self, "allowed_token_ids", _as_tuple(allowed))
        bias: Any = self.logit_bias
        if isinstance(bias, dict) and any(isinstance(key, str) for key in bias):
            bias = {_as_token_id(key): value for key, value in bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", bias)
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)

    @property
    def greedy(self) -> bool:
        """Whether every draw is the argmax."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Whether drawing needs the token history."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0
