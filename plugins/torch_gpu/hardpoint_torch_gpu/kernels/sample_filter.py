"""Where a row's top-k and top-p end: found by counting, not by sorting, in pieces of the vocabulary side by side.

Logits order tokens as weights do. They are counted in bins by how far they lie below the row's largest; where the bins
in which the filters can end hold many tokens, these are counted once more in finer ones. The keys in what is left are
listed, and one program per row finds the last key that is kept among them by bisection. Its equals are kept in the
order of their ids: how many is told, and the draw counts them. Counts and fixed-point weights are integers, so every
step is exact, in whatever order programs run. No launch reads what it writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_platforms.batch import SamplingInputs
from hardpoint_torch_gpu.kernels.sample_bins import (
    ABOVE,
    BINS,
    COLUMNS,
    FINE,
    FINE_AT,
    HEAD,
    HIGHEST,
    LISTED,
    LOWEST_OF,
    OFFSET,
    TOTAL,
    bin_of,
    depth_of,
    fine_of,
    first_range,
    floor_of,
    keep_bins,
    keep_parts,
    kept_bins,
    kept_parts,
    last_range,
    limit_of,
    searched,
    weight_left,
    where_in,
)
from hardpoint_torch_gpu.kernels.sample_pieces import (
    BEYOND,
    LOWEST,
    Pieces,
    fixed_weight,
    from_key,
    inverse_of,
    order_key,
    piece_of,
    row_best,
    scale_of,
    warps_of,
)

#: The key of what is not to be counted: below every key.
_NONE: tl.constexpr = tl.constexpr(-(1 << 40))
#: Longest list of a row; where more tokens are left, the row itself is searched.
LONGEST = 32768
#: Tokens in the bins from which on they are divided.
MANY = 1024
#: Programs of a launch over pieces, about as many as a large GPU runs side by side; more rows have one each.
PROGRAMS = 1024
#: Keys that the program of a row searches at once, and its warps.
CHUNK, WARPS = 2048, 4


@triton.jit
def _asked(best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab, pieces, PAD: tl.constexpr):
    """Of a row: temperature, largest key, tokens that top-k keeps, top-p."""
    limit = limit_of(tl.load(top_k_ptr + row), vocab)
    return tl.load(temperature_ptr + row), row_best(best_ptr, row, pieces, PAD), limit, tl.load(top_p_ptr + row)


@triton.jit
def _reaches(best, last, top, inverse):
    """Whether the piece with the largest key at `best` has tokens in the bins up to `last`."""
    return bin_of(depth_of(from_key(tl.load(best)), top, inverse)) <= last


@triton.jit(do_not_specialize=["each"])
def _count(
    x_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, work_ptr, vocab, pieces, each,
    SCALE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens per bin, and the weight of all where top-p asks for it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, best, limit, top_p = _asked(best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab, pieces, PAD)
    if searched(temperature, limit, top_p, best, vocab) == 0:
        return
    floor, top, inverse = floor_of(tl.load(min_p_ptr + row)), from_key(best), inverse_of(temperature)
    counts, weight = tl.zeros([BINS], tl.int32), tl.zeros([BLOCK], tl.int64)
    for piece in range(part * each, tl.minimum(part * each + each, pieces)):
        x, _, inside = piece_of(x_ptr, row, piece, vocab, BLOCK)
        counts += tl.histogram(bin_of(depth_of(x, top, inverse)), BINS, mask=inside)
        if top_p < 1.0:
            weight += weight_left(x, top, inverse, floor, SCALE)
    work = work_ptr + row * COLUMNS
    tl.atomic_add(work + tl.arange(0, BINS), counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    if top_p < 1.0:
        tl.atomic_add(work + TOTAL, tl.sum(weight, 0), sem="relaxed")


@triton.jit(do_not_specialize=["each"])
def _divide(
    x_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, work_ptr, vocab, pieces, each,
    SCALE: tl.constexpr, MANY: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In which bins the filters can end; if those hold many, tokens per part of them, and the weight above them."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, best, limit, top_p = _asked(best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab, pieces, PAD)
    if searched(temperature, limit, top_p, best, vocab) == 0:
        return
    work, floor = work_ptr + row * COLUMNS, floor_of(tl.load(min_p_ptr + row))
    first, last, within, number = first_range(work, limit, top_p, floor, vocab, SCALE)
    if part == 0:
        keep_bins(work, first, last, within, number)
    if within <= MANY:
        return
    top, inverse = from_key(best), inverse_of(temperature)
    counts, weight = tl.zeros([FINE], tl.int32), tl.zeros([BLOCK], tl.int64)
    for piece in range(part * each, tl.minimum(part * each + each, pieces)):
        if _reaches(best_ptr + row * pieces + piece, last, top, inverse):
            x, _, inside = piece_of(x_ptr, row, piece, vocab, BLOCK)
            depth = depth_of(x, top, inverse)
            place = bin_of(depth)
            near = inside & (place >= first) & (place <= last)
            counts += tl.histogram(fine_of(depth, first, last), FINE, mask=near)
            if top_p < 1.0:
                weight += tl.where(place < first, weight_left(x, top, inverse, floor, SCALE), 0)
    tl.atomic_add(work + FINE_AT + tl.arange(0, FINE), counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    if top_p < 1.0:
        tl.atomic_add(work + HEAD, tl.sum(weight, 0), sem="relaxed")


@triton.jit(do_not_specialize=["each"])
def _list(
    x_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, work_ptr, list_ptr, vocab, pieces, room, each,
    SCALE: tl.constexpr, MANY: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The keys among which the filters end, how many and between which they are, and the weight above them."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, best, limit, top_p = _asked(best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab, pieces, PAD)
    if searched(temperature, limit, top_p, best, vocab) == 0:
        return
    work, floor = work_ptr + row * COLUMNS, floor_of(tl.load(min_p_ptr + row))
    first, last = kept_bins(work)
    fine_first, fine_last, number = last_range(work, first, last, limit, top_p, floor, vocab, SCALE, MANY)
    if part == 0:
        keep_parts(work, fine_first, fine_last, number)
    top, inverse = from_key(best), inverse_of(temperature)
    weight = tl.zeros([BLOCK], tl.int64)
    for piece in range(part * each, tl.minimum(part * each + each, pieces)):
        if _reaches(best_ptr + row * pieces + piece, last, top, inverse):
            x, _, inside = piece_of(x_ptr, row, piece, vocab, BLOCK)
            above, within = where_in(x, top, inverse, first, last, fine_first, fine_last)
            if top_p < 1.0:
                weight += tl.where(inside & above, weight_left(x, top, inverse, floor, SCALE), 0)
            listed = (inside & within).to(tl.int32)
            found = tl.sum(listed, 0)
            if found > 0:
                key = order_key(x)
                largest = tl.max(tl.where(listed > 0, key, LOWEST), 0).to(tl.int64)
                smallest = tl.min(tl.where(listed > 0, key, BEYOND), 0).to(tl.int64)
                tl.atomic_max(work + HIGHEST, largest + OFFSET, sem="relaxed")
                tl.atomic_max(work + LOWEST_OF, -smallest + OFFSET, sem="relaxed")
                start = tl.atomic_add(work + LISTED, found.to(tl.int64), sem="relaxed").to(tl.int32)
                place = start + tl.cumsum(listed, 0) - 1
                stored = (listed > 0) & (place >= 0) & (place < room)
                tl.store(list_ptr + row * room + place, key, mask=stored)
    if top_p < 1.0:
        tl.atomic_add(work + ABOVE, tl.sum(weight, 0), sem="relaxed")


@triton.jit
def _entries(
    x_ptr, list_ptr, row, at, span, vocab, room, top, inverse, first, last, fine_first, fine_last,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Keys of a stretch of the list, or of the row, int64; _NONE where there is none in the range."""
    place = at + tl.arange(0, CHUNK)
    if span <= room:
        there = place < span
        key = tl.load(list_ptr + row * room + place, mask=there, other=0)
    else:
        x = tl.load(x_ptr + row * vocab + place, mask=place < vocab, other=float("-inf"))
        _, within = where_in(x, top, inverse, first, last, fine_first, fine_last)
        there = within & (place < vocab)
        key = order_key(x)
    return tl.where(there, key.to(tl.int64), _NONE)


@triton.jit
def _weigh(keys, top, inverse, floor, SCALE: tl.constexpr):
    """int64: weights of keys, 0 for _NONE."""
    return tl.where(keys > _NONE, weight_left(from_key(keys.to(tl.int32)), top, inverse, floor, SCALE), 0)


@triton.jit
def _above(
    keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, fine_first,
    fine_last, key, COUNTED: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many in the range have this key or a larger one (COUNTED), or their weight, int64.

    keys, weights: of the first stretch, which stays in registers.
    """
    value = tl.where(keys >= key, 1 if COUNTED else weights, 0).to(tl.int64)
    for at in range(CHUNK, tl.where(span <= room, span, vocab), CHUNK):
        more = _entries(
            x_ptr, list_ptr, row, at, span, vocab, room, top, inverse, first, last, fine_first, fine_last, CHUNK
        )
        value += tl.where(more >= key, 1 if COUNTED else _weigh(more, top, inverse, floor, SCALE), 0)
    return tl.sum(value, 0)


@triton.jit
def _reach(
    keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, fine_first,
    fine_last, low, high, goal, COUNTED: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Key with which the tokens in the range (COUNTED), or their weight, reach `goal`; what of it lies above the key.

    low, high: the smallest key in the range and the largest.
    """
    above = tl.full([], 0, tl.int64)  # of keys above `high`
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        value = _above(
            keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, fine_first,
            fine_last, middle, COUNTED, SCALE, CHUNK,
        )  # fmt: skip
        reached = value >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
        above = tl.where(reached, above, value)
    return low, above


@triton.jit
def _edge(
    x_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, work_ptr, list_ptr, key_ptr, kept_ptr,
    floor_ptr, vocab, pieces, room, SCALE: tl.constexpr, PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, best, limit, top_p = _asked(best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab, pieces, PAD)
    floor = floor_of(tl.load(min_p_ptr + row))
    tl.store(floor_ptr + row, floor)
    edge, kept = tl.full([], LOWEST, tl.int64), tl.full([], BEYOND, tl.int64)
    if searched(temperature, limit, top_p, best, vocab):
        work, top, inverse = work_ptr + row * COLUMNS, from_key(best), inverse_of(temperature)
        first, last = kept_bins(work)
        fine_first, fine_last, number = kept_parts(work)
        span = tl.load(work + LISTED).to(tl.int32)
        ceiling, bottom = tl.load(work + HIGHEST) - OFFSET, -tl.load(work + LOWEST_OF) + OFFSET
        above, total = tl.load(work + ABOVE), tl.load(work + TOTAL)
        keys = _entries(
            x_ptr, list_ptr, row, 0, span, vocab, room, top, inverse, first, last, fine_first, fine_last, CHUNK
        )
        weights = _weigh(keys, top, inverse, floor, SCALE)
        if limit < vocab:
            edge, more = _reach(
                keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, fine_first,
                fine_last, bottom, ceiling, limit - number, True, SCALE, CHUNK,
            )  # fmt: skip
            kept = limit - number - more
            if top_p < 1.0:
                each = weight_left(from_key(edge.to(tl.int32)), top, inverse, floor, SCALE)
                heavy = _above(
                    keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last,
                    fine_first, fine_last, edge + 1, False, SCALE, CHUNK,
                )  # fmt: skip
                total = above + heavy + kept * each
        if top_p < 1.0:
            goal = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1) - above
            low, heavier = _reach(
                keys, weights, x_ptr, list_ptr, row, span, vocab, room, top, inverse, floor, first, last, fine_first,
                fine_last, bottom, ceiling, goal, False, SCALE, CHUNK,
            )  # fmt: skip
            each = tl.maximum(fixed_weight(from_key(low.to(tl.int32)), top, inverse, SCALE), 1)
            missing = tl.maximum((goal - heavier + each - 1) // each, 1)
            kept = tl.where(low > edge, missing, tl.minimum(kept, missing))
            edge = tl.maximum(low, edge)
    tl.store(key_ptr + row, edge.to(tl.int32))
    tl.store(kept_ptr + row, tl.minimum(kept, BEYOND).to(tl.int32))


@dataclass(frozen=True, eq=False)
class Edges:
    """What the filters of R rows keep: logits above a key, and of its equals the first ones by id.

    Attributes:
        key: int32 [R], of the last logit that is kept. kept: int32 [R], how many that have it.
        floor: float32 [R], lowest (logit - max) / temperature that min-p keeps.
    """

    key: torch.Tensor
    kept: torch.Tensor
    floor: torch.Tensor


def edges_of(
    x: torch.Tensor,
    temperature: torch.Tensor,
    inputs: SamplingInputs,
    pieces: Pieces,
    longest: int = LONGEST,
    many: int = MANY,
    programs: int = PROGRAMS,
) -> Edges:
    """Of adjusted logits float32 [R, V] whose pieces these are. No result depends on the sizes.

    longest: of the list that is searched; many: tokens from which on bins are divided; programs: of a launch, about.
    """
    rows, vocab = x.shape
    device, count, room = x.device, pieces.count, min(vocab, longest)
    asked = (temperature, inputs.top_k.contiguous(), inputs.top_p.contiguous(), inputs.min_p.contiguous())
    work = torch.zeros((rows, COLUMNS.value), dtype=torch.int64, device=device)
    listed = torch.empty((rows, room), dtype=torch.int32, device=device)
    found = Edges(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
    each = triton.cdiv(count, min(count, triton.cdiv(programs, rows)))
    grid, scale = (rows, triton.cdiv(count, each)), scale_of(vocab)
    sizes = {"SCALE": scale, "PAD": pieces.pad, "BLOCK": pieces.block, "num_warps": warps_of(pieces.block)}
    _count[grid](x, pieces.best, *asked, work, vocab, count, each, **sizes)
    _divide[grid](x, pieces.best, *asked, work, vocab, count, each, MANY=many, **sizes)
    _list[grid](x, pieces.best, *asked, work, listed, vocab, count, room, each, MANY=many, **sizes)
    _edge[(rows,)](
        x, pieces.best, *asked, work, listed, found.key, found.kept, found.floor, vocab, count, room, SCALE=scale,
        PAD=pieces.pad, CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip
    return found
