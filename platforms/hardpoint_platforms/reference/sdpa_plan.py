"""One step's index work for attention, done once and read by every layer.

Requests with one new token (decode) are attended together: their keys are gathered into one padded block. Requests
with more (prefill) are attended one by one, in blocks of queries.

    keys of a request   |.. slid out ..|######## seen by the block ########|
                        0              k0                                  k1 = position of its last query + 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hardpoint_platforms.batch import AttentionBatch, Int32s
from hardpoint_platforms.ops.provider import AttentionPlanner
from hardpoint_platforms.reference.plan import Put
from hardpoint_platforms.trees import mapped

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Queries per block where a mask is needed: bounds scores and skips keys that no query of the block sees.
_QUERY_BLOCK = 512
#: Rows share a padded block while the shortest has at least this share of the longest's keys ...
_LEAST_FILL = 0.5
#: ... or the difference is no more than this many keys.
_FEW_KEYS = 64
#: Keys gathered at once, over all rows.
_MOST_KEYS = 1 << 17


@dataclass(frozen=True)
class Need:
    """What a family of attention ops wants planned.

    `masked` asks for a mask on every prefill block, for kernels that cannot be told "causal".
    """

    group: int
    window: int | None
    dtype: torch.dtype
    masked: bool


@dataclass(frozen=True, eq=False)
class KeySource:
    """Where the keys of some rows lie in the pool, `length` for each row.

    Attributes:
        slots: int64 [rows * length], page * page_tokens + offset; None where they are one run in the pool.
        start: the run's first slot (slots None).
        rows, length: see above.
    """

    slots: torch.Tensor | None
    start: int
    rows: int
    length: int


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Rows of one new token each that are attended together.

    Attributes:
        tokens: their places among the step's tokens; None for the first `rows` in order.
        keys: where their keys lie, `keys.length` each.
        mask: [rows, 1, 1, length], 0 or minus infinity; None where all keys are seen.
    """

    tokens: torch.Tensor | None
    keys: KeySource
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class QueryBlock:
    """Queries [first, last) of a request, over its keys [k0, k1).

    `mask` is for queries in *reverse* order: then it depends on (query + key) alone and is a strided view of one line.
    None means causal with as many keys as queries.
    """

    first: int
    last: int
    k0: int
    k1: int
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class PrefillRequest:
    """A request with several new tokens, at [first, last) of the step's tokens.

    `keys` is None where nothing was cached before: its keys are the step's own.
    """

    first: int
    last: int
    keys: KeySource | None
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """A step as one family of ops sees it. `slots`: int64 [T], where each token is stored in the pool."""

    slots: torch.Tensor
    num_tokens: int
    decode: tuple[DecodeRows, ...]
    prefill: tuple[PrefillRequest, ...]


class SdpaPlan:
    """A step's batch; the index work for each family of ops is done when its first layer asks, once per step."""

    def __init__(self, batch: AttentionBatch, put: Put | None) -> None:
        self._batch, self._put = batch, put
        self._parts: dict[Need, GroupPlan] = {}

    def part(self, need: Need) -> GroupPlan:
        """The plan as ops with this need read it."""
        found = self._parts.get(need)
        if found is None:
            found = _plan_group(self._batch, need)
            if self._put is not None:
                found = mapped(found, self._put)
            self._parts[need] = found
        return found


class SdpaPlanner(AttentionPlanner):
    """Makes `SdpaPlan`s, whose tensors `put` brings to the device; None where they are there."""

    def __init__(self, put: Put | None) -> None:
        self._put = put

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        return SdpaPlan(batch, self._put)


def _plan_group(batch: AttentionBatch, need: Need) -> GroupPlan:
    requests = batch.num_requests
    starts = batch.query_start[: requests + 1].astype(np.int64)
    lengths = batch.sequence_lengths[:requests].astype(np.int64)
    table = batch.page_tables[need.group]
    new = np.diff(starts)
    single = np.flatnonzero(new == 1)
    several = np.flatnonzero(new > 1)
    return GroupPlan(
        slots=torch.from_numpy(batch.slot_mapping[need.group].astype(np.int64)),
        num_tokens=batch.num_tokens,
        decode=tuple(_decode_rows(single, starts, lengths, table, batch.page_tokens, need)) if single.size else (),
        prefill=tuple(
            _prefill(int(starts[r]), int(starts[r + 1]), int(lengths[r]), table[r], batch.page_tokens, need)
            for r in several
        ),
    )


def _decode_rows(
    rows: Int64s, starts: Int64s, lengths: Int64s, table: Int32s, page_tokens: int, need: Need
) -> Iterator[DecodeRows]:
    ends = lengths[rows]
    begins = np.zeros_like(ends) if need.window is None else np.maximum(ends - need.window, 0)
    order = np.argsort(begins - ends, kind="stable")
    blocks = list(_similar((ends - begins)[order]))
    for low, high in blocks:
        chosen = np.arange(rows.size) if len(blocks) == 1 else order[low:high]
        tokens = starts[rows[chosen]]
        in_order = len(blocks) == 1 and tokens[-1] == rows.size - 1
        keys, hidden = _padded_keys(table[rows[chosen]], begins[chosen], ends[chosen], page_tokens)
        yield DecodeRows(
            tokens=None if in_order else torch.from_numpy(tokens),
            keys=keys,
            mask=None if hidden is None else _additive(hidden, need.dtype).view(keys.rows, 1, 1, keys.length),
        )


def _similar(seen: Int64s) -> Iterator[tuple[int, int]]:
    """Cut key counts, longest first, into stretches that pad little."""
    low = 0
    for place in range(1, seen.size + 1):
        if place < seen.size:
            longest = int(seen[low])
            close = seen[place] >= _LEAST_FILL * longest or longest - seen[place] <= _FEW_KEYS
            if close and (place - low) * longest < _MOST_KEYS:
                continue
        yield low, place
        low = place


def _padded_keys(table: Int32s, begins: Int64s, ends: Int64s, page_tokens: int) -> tuple[KeySource, Bools | None]:
    """Keys [begins, ends) of each row, and which places are padding (None for none).

    Padding repeats the row's last key: what lies elsewhere in the pool may be anything, and 0 * nan is nan.
    """
    if ends.size == 1:
        return _source(table[0], int(begins[0]), int(ends[0]), page_tokens), None
    length = int((ends - begins).max())
    places = begins[:, None] + np.arange(length)
    hidden = places >= ends[:, None]
    places = np.minimum(places, ends[:, None] - 1)
    pages = np.take_along_axis(table, places // page_tokens, axis=1).astype(np.int64)
    slots = torch.from_numpy((pages * page_tokens + places % page_tokens).reshape(-1))
    return KeySource(slots, 0, ends.size, length), hidden if hidden.any() else None


def _prefill(first: int, last: int, length: int, table: Int32s, page_tokens: int, need: Need) -> PrefillRequest:
    new, window = last - first, need.window
    cached = length - new
    begin = 0 if window is None else max(0, cached - window + 1)
    keys = None
    if cached:
        keys = _source(table, begin, length, page_tokens)
    if not cached and not need.masked and (window is None or new <= window):
        return PrefillRequest(first, last, keys, (QueryBlock(0, new, 0, new, None),))
    blocks = []
    for q0 in range(0, new, _QUERY_BLOCK):
        q1 = min(q0 + _QUERY_BLOCK, new)
        low = 0 if window is None else max(0, cached + q0 - window + 1)
        high = cached + q1
        mask = _diagonal_mask(q1 - q0, high - low, cached + q0 - low, window, need.dtype)
        blocks.append(QueryBlock(q0, q1, low - begin, high - begin, mask))
    return PrefillRequest(first, last, keys, tuple(blocks))


def _diagonal_mask(queries: int, keys: int, ahead: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[queries, keys] for queries in reverse order; forward query i stands at key ahead + i and sees none behind it.

    Reverse query i' and key j: the key lies j + i' - (queries - 1) - ahead behind (positive) the query's own place.
    """
    distance = np.arange(queries + keys - 1) - (queries - 1) - ahead
    hidden = distance > 0
    if window is not None:
        hidden |= distance <= -window
    return _additive(hidden, dtype).as_strided((queries, keys), (1, 1))


def _source(table: Int32s, begin: int, end: int, page_tokens: int) -> KeySource:
    """Keys [begin, end) of one request."""
    pages = table[begin // page_tokens : -(-end // page_tokens)]
    length, skip = end - begin, begin % page_tokens
    if (pages[1:] - pages[:-1] == 1).all():
        return KeySource(None, int(pages[0]) * page_tokens + skip, 1, length)
    slots = (pages.astype(np.int64)[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)
    return KeySource(torch.from_numpy(slots[skip : skip + length].copy()), 0, 1, length)


def _additive(hidden: Bools, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(dtype)
