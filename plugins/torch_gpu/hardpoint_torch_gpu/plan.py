"""A step's batch as the attention kernels read it: page tables, and who decodes and who brings several tokens.

Rows of a step are of unlike length, and a GPU is done when its last program is. So the keys of decoding rows are cut
into parts of like size, more for a long row (as FlashInfer's scheduler does: Ye et al. 2025, arXiv:2501.01005), and the
tiles of prompts are started longest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.provider import AttentionPlanner
from hardpoint_torch_gpu.rule import ScoreRule
from hardpoint_torch_gpu.sharing import (
    OWN_FIELDS,
    UNIT_FIELDS,
    HostSharing,
    Sharing,
    cut_tiles,
    find,
    most_units,
    no_tiles,
    tile_for,
)

#: Queries of one tile.
TILE = 128
#: Keys of one step of the decode kernel: parts are multiples of it.
BLOCK = 32
#: Numbers of a part: row (-1: none), token in the batch, number within its row, keys per part of that row.
PART_FIELDS = 4
#: Parts beyond one per row: with 8 heads of keys they keep a large GPU busy.
_MORE_PARTS = 64
#: Bytes of keys and values that tiles must save a layer. Their launch and partial results cost 4 microseconds for 32
#: rows and 20 for 256; an H200's L2 cache, where shared pages lie, is read in as much time at about so many.
WORTH = 128 << 20


@dataclass(frozen=True, eq=False)
class GpuPlan:
    """Device tensors, int32.

    Attributes:
        starts: [R + 1], first token of each request; lengths: [R], tokens it has after this step.
        tables: per cache group [R, P]; slots: per cache group [T].
        parts: [parts, PART_FIELDS], the keys of rows that bring one token; those of a row lie together, in order. A row
            of padding has length 0, one part, and a token of its own.
        tile_rows, tile_firsts: [tiles], the row of each tile and its first query there.
        page_tokens: tokens per page.
        padded: whether tokens of the batch belong to no row of these.
        sharing: per cache group what rows with one token share, or None; empty where it is not worth it in any.
        sharers: per cache group members of a tile at most, 0 where no layer can use tiles; empty if none can.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    parts: torch.Tensor
    tile_rows: torch.Tensor
    tile_firsts: torch.Tensor
    page_tokens: int
    padded: bool
    sharing: tuple[Sharing | None, ...] = field(default=(), kw_only=True)
    sharers: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def decodes_alone(self) -> bool:
        """Whether every row brings one token, and all tokens are some row's: such steps are recorded before serving."""
        return not self.padded and not len(self.tile_rows)

    def shared(self, group: int, rule: ScoreRule) -> Sharing | None:
        """What an op of a cache group reads once for several rows."""
        return self.sharing[group] if self.sharing and rule.same_for_all else None

    def with_room(self) -> GpuPlan:
        """The same with `sharing` that no row uses, on this plan's device: it launches what any other launches."""
        rows, device = len(self.lengths), self.lengths.device
        own, units, members = (
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in ((rows, OWN_FIELDS), (most_units(rows), UNIT_FIELDS), (rows,))
        )
        sharing = tuple(Sharing(own, self.parts, units, members, tile, 0) if tile else None for tile in self.sharers)
        return replace(self, sharing=sharing)


@dataclass(frozen=True)
class _Sharer:
    """Layers of a cache group that can use tiles: members of one at most, bytes of a cached token in a layer."""

    tile: int
    token_bytes: int


class GpuPlanner(AttentionPlanner):
    """Sends a batch to the device as one copy."""

    def __init__(self, upload: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]) -> None:
        self._upload = upload
        self._sharers: dict[int, _Sharer] = {}

    def share(self, group: int, heads: int, token_bytes: int) -> None:
        """Look for rows that share pages of a cache group from now on.

        heads: query heads per head of keys, in a layer that can use it; token_bytes: of a cached token in that layer.
        """
        before = self._sharers.get(group, _Sharer(tile_for(heads), token_bytes))
        tile, token_bytes = min(before.tile, tile_for(heads)), max(before.token_bytes, token_bytes)
        self._sharers[group] = _Sharer(tile, token_bytes)

    def plan(self, batch: AttentionBatch) -> GpuPlan:
        tokens, requests = len(batch.slot_mapping[0]), len(batch.sequence_lengths)
        fixed = batch.decode_only and tokens == requests
        if fixed:
            # With its padding a decode batch has one row per token, and a fixed number of parts: the same shapes
            # whatever it holds.
            rows = np.arange(requests, dtype=np.int32)
            parts = cut(rows, rows, batch.sequence_lengths, fixed=True)
            tile_rows = tile_firsts = np.zeros(0, np.int32)
            padded = False
        else:
            lengths = np.diff(batch.query_start[: batch.num_requests + 1])
            rows = np.flatnonzero(lengths == 1).astype(np.int32)
            parts = cut(rows, batch.query_start[rows], batch.sequence_lengths[rows], fixed=False)
            tile_rows, tile_firsts = tiles(lengths, batch.sequence_lengths[: batch.num_requests])
            padded = tokens > batch.num_tokens
        groups = len(batch.page_tables)
        common = self._common(batch, rows, fixed=fixed)
        arrays = (
            batch.query_start, batch.sequence_lengths, parts, tile_rows, tile_firsts, *batch.page_tables,
            *batch.slot_mapping, *_arrays(common, batch, rows, fixed=fixed),
        )  # fmt: skip
        sent = self._upload([torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)) for array in arrays])
        behind = iter(sent[5 + 2 * groups :])
        sharers = [self._sharers[group].tile if group in self._sharers else 0 for group in range(groups)]
        sharing = [
            None
            if found is None
            else Sharing(next(behind), next(behind), next(behind), next(behind), tile, found.saved)
            for found, tile in zip(common, sharers, strict=False)
        ]
        return GpuPlan(
            starts=sent[0],
            lengths=sent[1],
            parts=sent[2],
            tile_rows=sent[3],
            tile_firsts=sent[4],
            tables=sent[5 : 5 + groups],
            slots=sent[5 + groups : 5 + 2 * groups],
            page_tokens=batch.page_tokens,
            padded=padded,
            sharing=tuple(sharing),
            sharers=tuple(sharers) if any(sharers) else (),
        )

    def _common(self, batch: AttentionBatch, rows: np.ndarray, *, fixed: bool) -> tuple[HostSharing | None, ...]:
        """Per cache group what `rows` share, or None; empty where it is not worth it in any.

        With `fixed` a group that layers may share in has something in fixed sizes, if only of nothing.
        """
        if not self._sharers or len(rows) < 2:
            return ()
        found: dict[int, HostSharing] = {}
        requests = len(batch.sequence_lengths)
        whole = np.maximum(batch.sequence_lengths[rows] - 1, 0) // batch.page_tokens
        for group, one in self._sharers.items():
            if group < len(batch.page_tables):
                least = -(-WORTH // (one.token_bytes * batch.page_tokens))
                groups = find(batch.page_tables[group], rows, whole, one.tile, least)
                if groups is not None:
                    found[group] = cut_tiles(groups, requests, batch.page_tokens, one.tile, fixed=fixed)
        if not found:
            return ()
        empty = no_tiles(requests) if fixed else None
        return tuple(
            found.get(group, empty) if group in self._sharers else None for group in range(len(batch.page_tables))
        )


def _arrays(
    common: Sequence[HostSharing | None], batch: AttentionBatch, rows: np.ndarray, *, fixed: bool
) -> Iterator[np.ndarray]:
    """The arrays of each `Sharing`, in its order: parts are of what rows do not share."""
    for found in common:
        if found is not None:
            lengths = batch.sequence_lengths[rows] - found.own[rows, 0]
            parts = cut(rows, rows if fixed else batch.query_start[rows], lengths, fixed=fixed)
            yield from (found.own, parts, found.units, found.members)


def cut(rows: np.ndarray, tokens: np.ndarray, lengths: np.ndarray, *, fixed: bool) -> np.ndarray:
    """Parts int32 [parts, PART_FIELDS] of rows with `lengths` keys; `fixed`: as many as that many rows can ever have.

    Of n rows there are at most 2 n + _MORE_PARTS parts: each has total / (n + _MORE_PARTS) keys or more, but for what
    is rounded, and a row's number of parts is rounded to the nearest.
    """
    count = len(rows)
    if not count:
        return np.zeros((0, PART_FIELDS), np.int32)
    share = max(BLOCK, -(-int(lengths.sum()) // (count + _MORE_PARTS)))
    counts = np.maximum((lengths + share // 2) // share, 1)
    shares = np.maximum(-(-lengths // (counts * BLOCK)) * BLOCK, BLOCK)
    counts = np.maximum(-(-lengths // shares), 1)  # rounding a share up may leave its row fewer parts
    total = int(counts.sum())
    parts = np.full((2 * count + _MORE_PARTS if fixed else total, PART_FIELDS), -1, np.int32)
    which = np.repeat(np.arange(count), counts)
    parts[:total, 0], parts[:total, 1] = rows[which], tokens[which]
    parts[:total, 2] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    parts[:total, 3] = shares[which]
    return parts


def tiles(queries: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and first query, int32 [tiles], of the tiles of rows with more than one query; most keys first."""
    several = np.flatnonzero(queries > 1).astype(np.int32)
    counts = -(-queries[several] // TILE)
    rows = np.repeat(several, counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = (within * TILE).astype(np.int32)
    order = np.argsort(-(lengths[rows] - queries[rows] + firsts), kind="stable")
    return rows[order], firsts[order]
