"""The reference's attention plan: which tokens decode, which requests bring several tokens, and where pages lie.

    rows with one token      -> DecodeBlock: many rows at once, one gather over the padded page table
    rows with more tokens    -> Chunk: one request, its tokens next to each other in the batch

Outputs come block by block and chunk by chunk, then zeros for padding; `order` puts them back in batch order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch, Int32s
from hardpoint_platforms.ops.provider import AttentionPlanner

#: Brings a host tensor to a device.
Put = Callable[[torch.Tensor], torch.Tensor]
#: Cached tokens that one decode block may gather, so that the copy stays small.
BLOCK_TOKENS = 32768


@dataclass(frozen=True, eq=False)
class DecodeBlock:
    """Requests that bring one token each.

    Attributes:
        tokens: int64 [B], their places in the batch.
        last: int64 [B], position of the new token, which is also the last key.
        tables: per cache group int64 [B, P].
    """

    tokens: torch.Tensor
    last: torch.Tensor
    tables: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A request that brings several tokens: batch places [start, stop), positions from `computed` on.

    tables: per cache group int64 [P].
    """

    start: int
    stop: int
    computed: int
    tables: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class ReferencePlan:
    """Attributes: pages, offsets: per cache group int64 [T], where each new token is stored.

    order: int64 [T], place in the joined outputs of each token of the batch; None where that is its own place.
    padding: tokens of the batch that are not real, the last ones.
    """

    page_tokens: int
    pages: tuple[torch.Tensor, ...]
    offsets: tuple[torch.Tensor, ...]
    blocks: tuple[DecodeBlock, ...]
    chunks: tuple[Chunk, ...]
    order: torch.Tensor | None
    padding: int

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Outputs of blocks, then chunks, in batch order, zeros for padding. `pieces` may not be empty."""
        parts = list(pieces)
        if self.padding:
            parts.append(pieces[0].new_zeros((self.padding, *pieces[0].shape[1:])))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined if self.order is None else joined.index_select(0, self.order)


class ReferencePlanner(AttentionPlanner):
    """Plans for every reference kernel that reads or writes paged state. Runs on the host, outside the program."""

    def __init__(self, put: Put | torch.device) -> None:
        """`put` brings a host tensor to the device: `Device.to_device`; a torch device where torch itself does."""
        self._bring: Put = partial(_moved, put) if isinstance(put, torch.device) else put

    def plan(self, batch: AttentionBatch) -> ReferencePlan:
        starts = batch.query_start.astype(np.int64)[: batch.num_requests + 1]
        lengths = np.diff(starts)
        decodes, several = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
        blocks = tuple(self._block(batch, rows) for rows in _cut(batch, decodes))
        chunks = tuple(self._chunk(batch, int(row)) for row in several)
        total = len(batch.slot_mapping[0])
        places = [starts[decodes], *(np.arange(starts[r], starts[r + 1]) for r in several)]
        places.append(np.arange(batch.num_tokens, total))
        joined = np.concatenate(places)
        in_order = bool((joined == np.arange(total)).all())
        slots = [mapping.astype(np.int64) for mapping in batch.slot_mapping]
        return ReferencePlan(
            page_tokens=batch.page_tokens,
            pages=tuple(self._put(slot // batch.page_tokens) for slot in slots),
            offsets=tuple(self._put(slot % batch.page_tokens) for slot in slots),
            blocks=blocks,
            chunks=chunks,
            order=None if in_order else self._put(np.argsort(joined)),
            padding=total - batch.num_tokens,
        )

    def _block(self, batch: AttentionBatch, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> DecodeBlock:
        lengths = batch.sequence_lengths[rows]
        width = _pages(int(lengths.max()), batch.page_tokens)
        return DecodeBlock(
            tokens=self._put(batch.query_start[rows]),
            last=self._put(lengths - 1),
            tables=tuple(self._put(table[rows, :width]) for table in batch.page_tables),
        )

    def _chunk(self, batch: AttentionBatch, row: int) -> Chunk:
        start, stop = int(batch.query_start[row]), int(batch.query_start[row + 1])
        length = int(batch.sequence_lengths[row])
        width = _pages(length, batch.page_tokens)
        tables = tuple(self._put(table[row, :width]) for table in batch.page_tables)
        return Chunk(start, stop, length - (stop - start), tables)

    def _put(self, array: Int32s | np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
        return self._bring(torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)))


def _moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device)


def _pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


def _cut(
    batch: AttentionBatch, rows: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Runs of decode rows whose padded page tables stay within BLOCK_TOKENS."""
    cuts: list[int] = []
    first, longest = 0, 0
    for place, length in enumerate(batch.sequence_lengths[rows].tolist()):
        longest = max(longest, length)
        if place > first and longest * (place - first + 1) > BLOCK_TOKENS:
            cuts.append(place)
            first, longest = place, length
    return [part for part in np.split(rows, cuts) if len(part)]
