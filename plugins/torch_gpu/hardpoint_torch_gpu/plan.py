"""A step's batch as the attention kernels read it: page tables, and who decodes and who brings several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.provider import AttentionPlanner

#: Queries of one tile: of 64 and 128, and 32 to 128 keys per step, the fastest on an H200.
TILE = 128


@dataclass(frozen=True, eq=False)
class GpuPlan:
    """Device tensors, int32.

    Attributes:
        starts: [R + 1], first token of each request; lengths: [R], tokens it has after this step.
        tables: per cache group [R, P]; slots: per cache group [T].
        decode_rows, decode_tokens: [D], rows that bring one token, and its place in the batch. A row of padding has
            length 0 and a token of its own.
        tile_rows, tile_firsts: [tiles], the row of each tile and its first query there.
        page_tokens: tokens per page.
        padded: whether tokens of the batch belong to no row of these.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    decode_rows: torch.Tensor
    decode_tokens: torch.Tensor
    tile_rows: torch.Tensor
    tile_firsts: torch.Tensor
    page_tokens: int
    padded: bool


class GpuPlanner(AttentionPlanner):
    """Sends a batch to the device as one copy."""

    def __init__(self, upload: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]) -> None:
        self._upload = upload

    def plan(self, batch: AttentionBatch) -> GpuPlan:
        tokens, requests = len(batch.slot_mapping[0]), len(batch.sequence_lengths)
        if batch.decode_only and tokens == requests:
            # With its padding a decode batch has one row per token: the same shapes whatever it holds.
            rows = tokens_of = np.arange(requests, dtype=np.int32)
            tile_rows = tile_firsts = np.zeros(0, np.int32)
            padded = False
        else:
            lengths = np.diff(batch.query_start[: batch.num_requests + 1])
            rows = np.flatnonzero(lengths == 1).astype(np.int32)
            tokens_of = batch.query_start[rows]
            several = np.flatnonzero(lengths > 1).astype(np.int32)
            counts = -(-lengths[several] // TILE)
            tile_rows = np.repeat(several, counts)
            within = np.arange(len(tile_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            tile_firsts = (within * TILE).astype(np.int32)
            padded = tokens > batch.num_tokens
        groups = len(batch.page_tables)
        arrays = (
            batch.query_start, batch.sequence_lengths, rows, tokens_of, tile_rows, tile_firsts,
            *batch.page_tables, *batch.slot_mapping,
        )  # fmt: skip
        sent = self._upload([torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)) for array in arrays])
        return GpuPlan(
            starts=sent[0],
            lengths=sent[1],
            decode_rows=sent[2],
            decode_tokens=sent[3],
            tile_rows=sent[4],
            tile_firsts=sent[5],
            tables=sent[6 : 6 + groups],
            slots=sent[6 + groups :],
            page_tokens=batch.page_tokens,
            padded=padded,
        )
