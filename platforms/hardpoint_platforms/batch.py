"""What one step's batch looks like to attention and sampling: host arrays in, device tensors to the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """A ragged batch: R requests, T tokens, all requests' new tokens one after another.

        tokens     |--- request 0 ---|-- request 1 --|-- ... --| padding |
        query_start 0                q0              q0+q1      T_valid    T

    Attributes:
        query_start: int32 [R + 1], first token of each request; padded requests have no tokens.
        sequence_lengths: int32 [R], tokens each request has after this step: cached before it plus new. 0 for padding.
        page_tables: per cache group int32 [R, P]: page of tokens [p * page_tokens, (p + 1) * page_tokens). Unused
            entries, and pages that slid out of a window, are 0.
        slot_mapping: per cache group int32 [T]: page * page_tokens + offset where each new token is stored; padding
            points into page 0.
        page_tokens: tokens per page.
        num_requests: requests that are real, the first ones.
        num_tokens: tokens that are real, the first ones.
    """

    query_start: Int32s
    sequence_lengths: Int32s
    page_tables: tuple[Int32s, ...]
    slot_mapping: tuple[Int32s, ...]
    page_tokens: int
    num_requests: int
    num_tokens: int

    @property
    def decode_only(self) -> bool:
        """Whether every real request brings one token."""
        return self.num_requests == self.num_tokens


@dataclass(frozen=True, eq=False)
class Penalties:
    """Token history for penalties.

    Attributes:
        history: int64 [R, L], prompt then output; unused places hold the vocabulary size.
        prompt_lengths: int64 [R].
        presence, frequency, repetition: float32 [R]; 0, 0, 1 switch each off.
    """

    history: torch.Tensor
    prompt_lengths: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True, eq=False)
class LogitBias:
    """Sparse additions to the logits: bias, banned words, EOS below min_tokens (minus infinity).

    Attributes:
        rows, tokens: int64 [N].
        values: float32 [N]. Two entries for one place add up.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class SamplingInputs:
    """Parameters of R draws. One row never reads another's.

    Order of work: allowed mask, bias, penalties, temperature, min-p, top-k, top-p, draw. Log-probabilities are those of
    the raw logits.

    Attributes:
        temperature: float32 [R]; 0 means argmax (the first of equals).
        top_k: int64 [R]; 0 is off.
        top_p: float32 [R]; 1 is off.
        min_p: float32 [R]; 0 is off.
        seeds: int64 [R]; positions: int64 [R]. The draw is a function of (seed, position) and the row's logits alone.
        penalties, bias, allowed: None where no row uses them. allowed: int32 [R, ceil(V / 32)], bit b of word w set
            where token 32 * w + b may be drawn.
        num_logprobs: top log-probabilities wanted, 0 for the drawn token's alone, None for none.
        all_greedy: no row draws: kernels may take the argmax and stop.
        filters: whether any row uses top-k, top-p or min-p.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    allowed: torch.Tensor | None = None
    num_logprobs: int | None = None
    all_greedy: bool = False
    filters: bool = True


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities of R distributions.

    Attributes:
        chosen: float32 [R], of the token drawn (or given).
        rank: int64 [R], its rank, from 1.
        top_ids: int64 [R, k]; top: float32 [R, k], descending.
    """

    chosen: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass(frozen=True, eq=False)
class SampleResult:
    """Drawn tokens, still on the device.

    Attributes:
        token_ids: int64 [R].
        logprobs: where they were asked for.
        finite: bool [R], False where the raw logits held a NaN or an infinity; None where the kernel did not look.
    """

    token_ids: torch.Tensor
    logprobs: Logprobs | None = None
    finite: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class VerifyResult:
    """What became of R drafts of up to K tokens.

    Attributes:
        token_ids: int64 [R, K + 1]: the accepted draft tokens, then one token of the target's own, then -1.
        counts: int64 [R], tokens that are real in each row: accepted ones plus one.
    """

    token_ids: torch.Tensor
    counts: torch.Tensor
