"""A checked request becomes the messages that the engine takes: one per sequence, each with its own seed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from hardpoint.protocol.messages import EngineInfo, EngineRequest
from hardpoint.request.sampling import SamplingParams
from hardpoint.request.validation import RequestLimits


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text."""


def limits_of(
    info: EngineInfo, *, max_logprobs: int = 20, max_n: int = 128, max_stop_strings: int = 16
) -> RequestLimits:
    """What a request may ask of this engine: the caller's own limits, and those of model and device."""
    if info.max_logprobs is not None:
        max_logprobs = min(max_logprobs, info.max_logprobs)
    return RequestLimits(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_logprobs=max_logprobs,
        max_n=max_n,
        max_stop_strings=max_stop_strings,
        max_biased_tokens=info.max_biased_tokens,
    )


def complete(params: SamplingParams, tokenizer: Encoder | None) -> SamplingParams:
    """Fill in what only the tokenizer knows: end-of-sequence tokens, and bad words as token ids."""
    if tokenizer is None:
        return params
    changes: dict[str, object] = {}
    if not params.eos_token_ids:
        changes["eos_token_ids"] = tuple(tokenizer.eos_token_ids)
    if params.bad_words and not params.bad_words_ids:
        changes["bad_words_ids"] = bad_word_ids(params.bad_words, tokenizer)
    return msgspec.structs.replace(params, **changes) if changes else params


def bad_word_ids(words: Sequence[str], tokenizer: Encoder) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words, as they are spelled at the start of a text and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelling in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)


def child_seed(seed: int, index: int) -> int:
    """Seed of sequence `index`: the request's own for the first, for the others a hash of it and the index.

    A plain sum would make choice 1 of seed 7 equal to choice 0 of seed 8.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def expand(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int = 0,
    deadline: float | None = None,
    cache_salt: str = "",
) -> list[EngineRequest]:
    """The n messages of one request. Child 0 alone scores the prompt; the others wait for its prompt pages."""
    arrival = time.time()
    first = f"{request_id}#0"
    # stop strings are looked for in the text, which only the front end has
    common = msgspec.structs.replace(params, n=1, stop=(), bad_words=())
    children = []
    for index in range(params.n):
        changes: dict[str, object] = {}
        if params.seed is not None:
            changes["seed"] = child_seed(params.seed, index)
        if index and params.prompt_logprobs is not None:
            changes["prompt_logprobs"] = None
        children.append(
            EngineRequest(
                request_id=f"{request_id}#{index}",
                prompt=list(prompt),
                params=msgspec.structs.replace(common, **changes) if changes else common,
                priority=priority,
                deadline=deadline,
                cache_salt=cache_salt,
                parent=first if index else None,
                arrival=arrival,
            )
        )
    return children
