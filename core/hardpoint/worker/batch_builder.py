"""From a step plan to the host arrays and device tensors of one step, padded to a bucket where the device has any.

plan rows       r0 (3 new tokens)   r1 (1)   r2 (1)          -> T = 5 tokens, R = 3 requests
token of batch   0   1   2           3        4
request_of       0   0   0           1        2
position         c0  c0+1 c0+2       c1       c2              (c = tokens already in the cache)
slot             page_table[request, position // page] * page + position % page
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hardpoint.scheduler.plan import StepPlan
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.program import Bucket

Int64s = npt.NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class HostBatch:
    """One step on the host.

    Attributes:
        attention: what attention planners read.
        rows: int64 [T], table row of each token; positions: int64 [T].
        logits_index: int64 [S], last token of each request that is sampled.
        sampled: int64 [S], their places in the plan. Padding repeats place 0.
        num_sampled: how many of these are real.
    """

    attention: AttentionBatch
    rows: Int64s
    positions: Int64s
    logits_index: Int64s
    sampled: Int64s
    num_sampled: int


def build_host_batch(plan: StepPlan, page_tokens: int, bucket: Bucket, table_width: int) -> HostBatch:
    """Lay out a plan. Tokens, requests and page tables get the bucket's sizes, if it has any; padding points into page
    0."""
    num_requests, num_tokens = len(plan.rows), plan.num_tokens
    tokens, requests = bucket.tokens or num_tokens, bucket.requests or num_requests
    lengths = plan.query_lengths
    starts = np.zeros(requests + 1, np.int32)
    np.cumsum(lengths, out=starts[1 : num_requests + 1])
    starts[num_requests + 1 :] = num_tokens

    if num_requests == num_tokens:
        request_of = np.arange(num_requests)
        positions = plan.computed.astype(np.int64)
    else:
        request_of = np.repeat(np.arange(num_requests), lengths)
        positions = (np.arange(num_tokens) + np.repeat(plan.computed - starts[:num_requests], lengths)).astype(np.int64)
    page, offset = positions // page_tokens, positions % page_tokens
    slots = tuple(
        _padded(table[request_of, page] * page_tokens + offset, tokens).astype(np.int32) for table in plan.page_tables
    )
    attention = AttentionBatch(
        query_start=starts,
        sequence_lengths=_padded(plan.computed + lengths, requests).astype(np.int32),
        page_tables=tuple(
            _padded_table(t, requests, table_width if bucket.tokens else t.shape[1]) for t in plan.page_tables
        ),
        slot_mapping=slots,
        page_tokens=page_tokens,
        num_requests=num_requests,
        num_tokens=num_tokens,
    )
    sampled = np.flatnonzero(plan.samples)
    padded = _padded(sampled, requests) if bucket.requests else sampled
    return HostBatch(
        attention=attention,
        rows=_padded(plan.rows[request_of].astype(np.int64), tokens),
        positions=_padded(positions, tokens),
        logits_index=(starts[padded + 1] - 1).astype(np.int64),
        sampled=padded,
        num_sampled=len(sampled),
    )


def _padded(values: npt.NDArray[Scalar], size: int) -> npt.NDArray[Scalar]:
    if len(values) == size:
        return values
    out = np.zeros(size, values.dtype)
    out[: len(values)] = values
    return out


def _padded_table(table: npt.NDArray[np.int32], rows: int, width: int) -> npt.NDArray[np.int32]:
    if table.shape == (rows, width):
        return table
    out = np.zeros((rows, width), np.int32)
    out[: table.shape[0], : table.shape[1]] = table
    return out
