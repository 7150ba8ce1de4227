"""What a caller gets: pieces while it streams, and the whole at the end. Named as in vLLM's Python interface."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from hardpoint.protocol.messages import RequestTiming


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """One candidate at one position: its log-probability, its rank (from 1) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: Candidates at one position, by token id; the drawn token is first.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What is new of one sequence of one request.

    Attributes:
        index: sequence, 0 to n - 1.
        text: new text, never part of a stop string nor half a character.
        token_ids: new tokens.
        logprobs: one per new token, or None.
        finish_reason: stop, length, abort, timeout or error; None while it goes on.
        stop_reason: stop string or stop token.
        prompt_logprobs: once, with the first delta, if asked.
        cached_tokens: with the first delta.
        error: message for finish reason `error`.
        timing: with the last delta.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    cached_tokens: int | None = None
    error: str | None = None
    timing: RequestTiming | None = None


@dataclass
class CompletionOutput:
    """One finished sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """One finished request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
