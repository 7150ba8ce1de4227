"""What crosses between scheduler and worker: frozen plans down, frozen results up. Ints and numpy only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hardpoint.request.sampling import SamplingParams

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A request that starts (or starts again after preemption) on the worker: all that it must know.

    Attributes:
        row: the row of the worker's tables it lives in until released.
        request_id: for messages.
        tokens: prompt, and what was generated before a preemption. int32.
        prompt_length: tokens of these that are the prompt.
        params: how to sample. seed is never None here.
    """

    row: int
    request_id: str
    tokens: Int32s
    prompt_length: int
    params: SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: which rows run, how many tokens each, and where their pages are.

    Every request catches up `computed` to its known tokens, so prefill, a chunk of it, and decode look alike.
    The worker knows the token ids: it keeps each row's tokens, and appends what it samples.

    Attributes:
        step: number, counting up.
        released: rows whose sequence ended or was preempted since the last plan; taken before `new`.
        new: sequences to enter before this step.
        rows: int32 [R], rows in batch order, decodes (one token) first.
        query_lengths: int32 [R], new tokens of each.
        computed: int32 [R], tokens already in the cache before this step.
        samples: bool [R], whether the row reaches its last known token and draws the next.
        page_tables: per cache group int32 [R, P], valid in this step, unused entries 0.
    """

    step: int
    released: tuple[int, ...]
    new: tuple[NewSequence, ...]
    rows: Int32s
    query_lengths: Int32s
    computed: Int32s
    samples: npt.NDArray[np.bool_]
    page_tables: tuple[Int32s, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return int(self.query_lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class RowLogprobs:
    """Log-probabilities at one or more positions of a row.

    token_ids, logprobs: [N, 1 + k], the drawn (or prompt) token first; ranks: [N].
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step brought, in the plan's batch order.

    Attributes:
        step: the plan's number.
        tokens: int64 [R], the drawn token, -1 where `samples` was False.
        logprobs: by batch index, for rows that asked and drew.
        prompt_logprobs: by batch index: of prompt positions computed in this step, position p scored by the logits of
            p - 1. A chunk [a, b) of the prompt scores positions a + 1 .. min(b, prompt_length - 1).
        bad_rows: batch indices whose logits were not finite; their requests end with an error.
        seconds: time on the device.
    """

    step: int
    tokens: npt.NDArray[np.int64]
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    bad_rows: tuple[int, ...] = ()
    seconds: float = 0.0
