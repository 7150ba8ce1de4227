"""Where a row's top-k and top-p end: found by counting, not by sorting.

Logits order tokens as weights do. They are counted by how far they lie below the row's largest; the counts bound where
the filters end to a few bins; the tokens in those are listed, and the last key that is kept is found among them by
bisection. Its equals are kept in the order of their ids. Counts and fixed-point weights are integers, so every step is
exact, in whatever order programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_platforms.batch import SamplingInputs
from hardpoint_torch_gpu.kernels.sample_pieces import (
    BEYOND,
    LOWEST,
    Pieces,
    fixed_weight,
    from_key,
    inverse_of,
    order_key,
    row_best,
    scale_of,
    sound,
    warps_of,
)

#: Bins of logits, the last one without an end, and how many hold a factor of e in weight.
BINS: tl.constexpr = tl.constexpr(128)
_PER: tl.constexpr = tl.constexpr(8.0)
#: What float32 may be wrong by in a bound of a sum of weights.
_SLACK: tl.constexpr = tl.constexpr(1e-3)
#: Columns of the table of counts: one per bin, and the length of the row's list.
_COLUMNS: tl.constexpr = tl.constexpr(129)
#: The key of what is not to be counted: below every key.
_NONE: tl.constexpr = tl.constexpr(-(1 << 40))
#: Longest list of a row; where more tokens lie in the bins, the row itself is searched.
LONGEST = 32768


@triton.jit
def _limit(top_k, vocab):
    """Tokens that top-k keeps."""
    return tl.where((top_k <= 0) | (top_k > vocab), vocab, top_k).to(tl.int32)


@triton.jit
def _searched(temperature, top_k, top_p, best, vocab):
    """Whether a row's filters need more than a comparison per token."""
    return (temperature > 0.0) & ((_limit(top_k, vocab) < vocab) | (top_p < 1.0)) & sound(best)


@triton.jit
def _floor(min_p):
    """Lowest (logit - max) / temperature that min-p keeps."""
    smallest = tl.log(tl.maximum(min_p, 1e-30).to(tl.float64)).to(tl.float32)
    return tl.where(min_p > 0.0, smallest, float("-inf"))


@triton.jit
def _depth(x, best, inverse):
    """Bin of each logit."""
    return tl.minimum((best - x) * inverse * _PER, BINS - 1.0).to(tl.int32)


@triton.jit
def _count_depths(
    x_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, counts_ptr, vocab, pieces, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, best = tl.load(temperature_ptr + row), row_best(best_ptr, row, pieces, PAD)
    if _searched(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), best, vocab) == 0:
        return
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(x_ptr + row * vocab + column, mask=inside, other=float("-inf"))
    counts = tl.histogram(_depth(x, from_key(best), inverse_of(temperature)), BINS, mask=inside)
    tl.atomic_add(counts_ptr + row * _COLUMNS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _bounds(counts, limit, top_p, floor, vocab):
    """First and last bin in which a filter may end, of a row's int32 [BINS] counts."""
    depth = tl.arange(0, BINS)
    # Bins below min-p weigh nothing; the one it lies in, and its neighbours by rounding, may weigh anything less.
    deepest = tl.minimum(-floor * _PER, BINS - 1.0).to(tl.int32)
    number, bin_top = counts.to(tl.float32), depth.to(tl.float32) / _PER
    high = tl.where(depth <= deepest + 1, number * tl.exp(-bin_top) * (1.0 + _SLACK), 0.0)
    certain = (depth < deepest - 1) & (depth < BINS - 1)
    low = tl.where(certain, number * tl.exp(-bin_top - 1.0 / _PER) * (1.0 - _SLACK), 0.0)
    limited = limit < vocab
    k_bin = tl.minimum(tl.sum((tl.cumsum(counts, 0) < limit).to(tl.int32), 0), BINS - 1)
    most = tl.sum(tl.where(depth <= k_bin, high, 0.0), 0)
    least = tl.sum(tl.where(depth < k_bin, low, 0.0), 0)
    p_first = tl.sum((tl.cumsum(high, 0) < top_p * least * (1.0 - _SLACK)).to(tl.int32), 0)
    p_last = tl.sum((tl.cumsum(low, 0) < top_p * most).to(tl.int32), 0)
    p_first, p_last = tl.minimum(p_first, k_bin), tl.minimum(p_last, k_bin)
    first = tl.where(top_p < 1.0, p_first, k_bin)
    last = tl.where(limited, k_bin, p_last)
    return first, last


@triton.jit
def _list_edge(
    x_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, counts_ptr, list_ptr, head_ptr, total_ptr,
    vocab, pieces, room, SCALE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, best = tl.load(temperature_ptr + row), row_best(best_ptr, row, pieces, PAD)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if _searched(temperature, top_k, top_p, best, vocab) == 0:
        return
    floor, top, inverse = _floor(tl.load(min_p_ptr + row)), from_key(best), inverse_of(temperature)
    counts = tl.load(counts_ptr + row * _COLUMNS + tl.arange(0, BINS))
    first, last = _bounds(counts, _limit(top_k, vocab), top_p, floor, vocab)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(x_ptr + row * vocab + column, mask=inside, other=float("-inf"))
    depth = _depth(x, top, inverse)
    if top_p < 1.0:
        weight = tl.where((x - top) * inverse >= floor, fixed_weight(x, top, inverse, SCALE), 0)
        tl.store(head_ptr + row * pieces + piece, tl.sum(tl.where(depth < first, weight, 0), 0))
        tl.store(total_ptr + row * pieces + piece, tl.sum(weight, 0))
    listed = (inside & (depth >= first) & (depth <= last)).to(tl.int32)
    found = tl.sum(listed, 0)
    if found > 0:
        base = tl.atomic_add(counts_ptr + row * _COLUMNS + BINS, found, sem="relaxed")
        place = base + tl.cumsum(listed, 0) - 1
        tl.store(list_ptr + row * room + place, column, mask=(listed > 0) & (place < room))


@triton.jit
def _entries(
    x_ptr, list_ptr, row, at, span, vocab, room, top, inverse, floor, first, last, SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Keys, weights (both int64) and ids of a stretch of the list, or of the row. Outside the bins keys are _NONE."""
    place = at + tl.arange(0, CHUNK)
    from_list = span <= room
    token = tl.load(list_ptr + row * room + place, mask=place < tl.where(from_list, span, 0), other=0)
    token = tl.where(from_list, token, place)
    x = tl.load(x_ptr + row * vocab + token, mask=place < span, other=float("-inf"))
    depth = _depth(x, top, inverse)
    there = (place < span) & (depth >= first) & (depth <= last)
    weight = tl.where((x - top) * inverse >= floor, fixed_weight(x, top, inverse, SCALE), 0)
    return tl.where(there, order_key(x).to(tl.int64), _NONE), weight, token


@triton.jit
def _above(
    keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, key,
    SCALE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many in the bins have this key or a larger one, int32, and their weight, int64.

    keys, weights: of the first stretch, which stays in registers.
    """
    number = (keys >= key).to(tl.int32)
    weight = tl.where(keys >= key, weights, 0)
    for at in range(CHUNK, span, CHUNK):
        more, heavy, _ = _entries(
            x_ptr, list_ptr, row, at, span, vocab, room, top, inverse, floor, first, last, SCALE, CHUNK
        )
        number += (more >= key).to(tl.int32)
        weight += tl.where(more >= key, heavy, 0)
    return tl.sum(number, 0), tl.sum(weight, 0)


@triton.jit
def _level(
    keys, ids, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, key, highest,
    SCALE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many in the bins have this very key and an id up to `highest`."""
    number = ((keys == key) & (ids <= highest)).to(tl.int32)
    for at in range(CHUNK, span, CHUNK):
        more, _, token = _entries(
            x_ptr, list_ptr, row, at, span, vocab, room, top, inverse, floor, first, last, SCALE, CHUNK
        )
        number += ((more == key) & (token <= highest)).to(tl.int32)
    return tl.sum(number, 0)


@triton.jit
def _reach(
    keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, low, high, goal,
    COUNTED: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Key with which the tokens in the bins (COUNTED), or their weight, reach `goal`; what lies above it of both."""
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        number, weight = _above(
            keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, middle, SCALE,
            CHUNK,
        )  # fmt: skip
        reached = (number if COUNTED else weight) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    number, weight = _above(
        keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, low + 1, SCALE, CHUNK
    )
    return low, number, weight


@triton.jit
def _k_edge(
    keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, low, high, wanted,
    SCALE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Key of the token that is the `wanted`-th in the bins, how many of its equals stay, and the weight of all."""
    low, number, weight = _reach(
        keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, low, high, wanted,
        True, SCALE, CHUNK,
    )  # fmt: skip
    logit, kept = from_key(low.to(tl.int32)), (wanted - number).to(tl.int64)
    each = tl.where((logit - top) * inverse >= floor, fixed_weight(logit, top, inverse, SCALE), 0)
    return low, kept, weight + kept * each


@triton.jit
def _p_edge(
    keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, low, high, goal,
    SCALE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Key with which the weight in the bins reaches `goal`, and how many of its equals that takes."""
    low, _, weight = _reach(
        keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, low, high, goal,
        False, SCALE, CHUNK,
    )  # fmt: skip
    each = tl.maximum(fixed_weight(from_key(low.to(tl.int32)), top, inverse, SCALE), 1)
    return low, tl.maximum((goal - weight + each - 1) // each, 1)


@triton.jit
def _last_id(
    keys, ids, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, key, kept,
    SCALE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The id of the `kept`-th token that has this key; `vocab` where all of them stay."""
    found = vocab
    equals = _level(
        keys, ids, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, key, vocab, SCALE, CHUNK
    )
    if kept < equals:
        low, high = vocab * 0, vocab - 1
        while low < high:
            middle = (low + high) // 2
            number = _level(
                keys, ids, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, key, middle,
                SCALE, CHUNK,
            )  # fmt: skip
            high = tl.where(number >= kept, middle, high)
            low = tl.where(number >= kept, low, middle + 1)
        found = low
    return found


@triton.jit
def _edge(
    x_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, counts_ptr, list_ptr, head_ptr, total_ptr,
    key_ptr, last_ptr, floor_ptr, vocab, pieces, room, SCALE: tl.constexpr, PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, best = tl.load(temperature_ptr + row), row_best(best_ptr, row, pieces, PAD)
    top_k, top_p, floor = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), _floor(tl.load(min_p_ptr + row))
    tl.store(floor_ptr + row, floor)
    edge, kept = tl.full([], LOWEST, tl.int64), tl.full([], BEYOND, tl.int64)
    last_id = vocab
    if _searched(temperature, top_k, top_p, best, vocab):
        limit, top, inverse = _limit(top_k, vocab), from_key(best), inverse_of(temperature)
        bins, piece = tl.arange(0, BINS), tl.arange(0, PAD)
        counts = tl.load(counts_ptr + row * _COLUMNS + bins)
        first, last = _bounds(counts, limit, top_p, floor, vocab)
        span = tl.load(counts_ptr + row * _COLUMNS + BINS)
        span = tl.where(span <= room, span, vocab)
        keys, weights, ids = _entries(
            x_ptr, list_ptr, row, 0, span, vocab, room, top, inverse, floor, first, last, SCALE, CHUNK
        )
        lowest, highest = tl.where(keys == _NONE, BEYOND, keys), keys
        for at in range(CHUNK, span, CHUNK):
            more, _, _ = _entries(
                x_ptr, list_ptr, row, at, span, vocab, room, top, inverse, floor, first, last, SCALE, CHUNK
            )
            lowest = tl.minimum(lowest, tl.where(more == _NONE, BEYOND, more))
            highest = tl.maximum(highest, more)
        bottom, ceiling = tl.min(lowest, 0), tl.max(highest, 0)
        summed = piece < tl.where(top_p < 1.0, pieces, 0)
        head = tl.sum(tl.load(head_ptr + row * pieces + piece, mask=summed, other=0), 0)
        total = tl.sum(tl.load(total_ptr + row * pieces + piece, mask=summed, other=0), 0)
        if limit < vocab:
            wanted = limit - tl.sum(tl.where(bins < first, counts, 0), 0)
            edge, kept, total = _k_edge(
                keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, bottom,
                ceiling, wanted, SCALE, CHUNK,
            )  # fmt: skip
            total += head
        if top_p < 1.0:
            goal = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
            low, missing = _p_edge(
                keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, bottom,
                ceiling, goal - head, SCALE, CHUNK,
            )  # fmt: skip
            kept = tl.where(low > edge, missing, tl.minimum(kept, missing))
            edge = tl.maximum(low, edge)
        last_id = _last_id(
            keys, ids, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, edge, kept, SCALE,
            CHUNK,
        )  # fmt: skip
    tl.store(key_ptr + row, edge.to(tl.int32))
    tl.store(last_ptr + row, last_id)


@dataclass(frozen=True, eq=False)
class Edges:
    """What the filters of R rows keep: logits above a key, and of the equals those whose ids are not too high.

    Attributes:
        key: int32 [R], of the last logit that is kept. last: int32 [R], the last of the ids that have it.
        floor: float32 [R], lowest (logit - max) / temperature that min-p keeps.
    """

    key: torch.Tensor
    last: torch.Tensor
    floor: torch.Tensor


def edges_of(
    x: torch.Tensor, temperature: torch.Tensor, inputs: SamplingInputs, pieces: Pieces, longest: int = LONGEST
) -> Edges:
    """Of adjusted logits float32 [R, V] whose pieces these are. `longest`: of the list that is searched."""
    rows, vocab = x.shape
    device, count, room = x.device, pieces.count, min(vocab, longest)
    asked = (temperature, inputs.top_k.contiguous(), inputs.top_p.contiguous())
    min_p = inputs.min_p.contiguous()
    counts = torch.zeros((rows, _COLUMNS.value), dtype=torch.int32, device=device)
    listed = torch.empty((rows, room), dtype=torch.int32, device=device)
    head, total = (torch.empty((rows, count), dtype=torch.int64, device=device) for _ in range(2))
    found = Edges(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
    grid, warps, scale = (rows, count), warps_of(pieces.block), scale_of(vocab)
    _count_depths[grid](
        x, pieces.best, *asked, counts, vocab, count, PAD=pieces.pad, BLOCK=pieces.block, num_warps=warps
    )
    _list_edge[grid](
        x, pieces.best, *asked, min_p, counts, listed, head, total, vocab, count, room, SCALE=scale,
        PAD=pieces.pad, BLOCK=pieces.block, num_warps=warps,
    )  # fmt: skip
    _edge[(rows,)](
        x, pieces.best, *asked, min_p, counts, listed, head, total, found.key, found.last, found.floor, vocab, count,
        room, SCALE=scale, PAD=pieces.pad, CHUNK=2048, num_warps=8,
    )  # fmt: skip
    return found
