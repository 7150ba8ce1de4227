"""The plan of every op that has state: rows of equal length for XLA, ragged offsets for the attention kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.provider import AttentionPlanner
from hardpoint_platforms.strict.static.plan import StaticPlan
from hardpoint_tpu.runtime import Runtime

Int64s = npt.NDArray[np.int64]
#: Most new tokens of one request that the attention kernel takes at once.
BLOCK = 32


@dataclass(frozen=True, eq=False)
class RaggedPlan(StaticPlan):
    """What `StaticPlan` has, and the batch as it came. A program takes along what its kernels read.

    Attributes:
        starts: int32 [R + 1], first token of each request.
        work: int32 [4, N], blocks of at most `block` new tokens of one request each: request, first token in the
            batch, its position, number of tokens; unused ones have none.
        block: 1 for a step of one token each.
    """

    starts: torch.Tensor
    work: torch.Tensor
    block: int


class RaggedPlanner(AttentionPlanner):
    """Plans on the host and moves the plan in one transfer."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def plan(self, batch: AttentionBatch) -> RaggedPlan:
        tokens, requests = len(batch.slot_mapping[0]), len(batch.sequence_lengths)
        width = 1 if tokens == requests and batch.decode_only else tokens
        block = 1 if width == 1 else min(BLOCK, tokens)
        starts = batch.query_start.astype(np.int64)
        counts, lengths = np.diff(starts), batch.sequence_lengths.astype(np.int64)
        computed = lengths - counts
        within = np.arange(width)[None]
        owner = np.repeat(np.arange(requests), counts)
        places = np.zeros(tokens, np.int64)
        places[: len(owner)] = owner * width + np.arange(len(owner)) - starts[owner]
        groups, size = len(batch.slot_mapping), batch.page_tokens
        host: list[Any] = [slots // size for slots in batch.slot_mapping]
        host += [slots % size for slots in batch.slot_mapping]
        host += list(batch.page_tables)
        host += [
            np.minimum(starts[:-1, None] + within, max(0, tokens - 1)),
            within < counts[:, None],
            np.clip(computed[:, None] + within, 0, np.maximum(lengths - 1, 0)[:, None]),
            places,
            computed == 0,
            batch.query_start,
            blocks_of(counts, computed, block, requests + tokens // block),
        ]
        narrow = [array if array.dtype == np.bool_ else array.astype(np.int32) for array in host]
        there = self._runtime.put([torch.from_numpy(array) for array in narrow], copy=False)
        pages, offsets, tables = (there[i * groups : (i + 1) * groups] for i in range(3))
        rows, valid, positions, placed, fresh, begins, work = there[3 * groups :]
        return RaggedPlan(
            size, pages, offsets, tables, rows, valid, positions, placed, fresh, starts=begins, work=work, block=block
        )


def blocks_of(counts: Int64s, computed: Int64s, block: int, size: int) -> Int64s:
    """int64 [4, size]: the work of `RaggedPlan`. `size` is enough where it is requests + tokens // block."""
    work = np.zeros((4, size), np.int64)
    parts = -(-counts // block)
    owner = np.repeat(np.arange(len(counts)), parts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = np.cumsum(counts) - counts
    work[:, : len(owner)] = (
        owner,
        first[owner] + number * block,
        computed[owner] + number * block,
        np.minimum(block, counts[owner] - number * block),
    )
    return work
