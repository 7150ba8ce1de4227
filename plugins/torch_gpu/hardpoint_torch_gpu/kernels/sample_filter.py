"""Where a row's top-k and top-p end: found by counting, not by sorting, in pieces of the vocabulary side by side.

Logits order tokens as weights do. One launch counts them by how far they lie below the row's largest; that bounds where
a filter ends to a range of keys. Each launch after it divides the range into bins, adds up what tokens or weights are
in them, and goes on with the bin in which the filter ends, down to a single key: three launches at most, and three more
where top-p follows top-k, since it is a share of what top-k leaves. Counts and fixed-point weights are integers, so
every step is exact, in whatever order programs run. The last program of a row decides how to go on; a row that is done,
or has no filter, costs a launch nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_platforms.batch import SamplingInputs
from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.sample_edge import (
    ABOVE,
    BINS,
    COLUMNS,
    COUNT,
    DEPTH_AT,
    DEPTHS,
    DONE,
    GOAL,
    HIGH,
    LOW,
    MODE,
    SHIFT,
    WEIGHT,
    at_goal,
    count_bin,
    depth_of,
    depths,
    everything,
    last_of_row,
    look_between,
    look_for_count,
    look_for_share,
)
from hardpoint_torch_gpu.kernels.sample_pieces import (
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

#: Launches from a range of any length to one key, for top-k and then for top-p.
_NARROWINGS = 6
#: Programs of a launch, about twice as many as a large GPU runs side by side; more rows than that have one each.
PROGRAMS = 768


@triton.jit
def _limit(top_k, vocab):
    """Tokens that top-k keeps."""
    return tl.where((top_k <= 0) | (top_k > vocab), vocab, top_k).to(tl.int32)


@triton.jit
def _floor(min_p):
    """Lowest (logit - max) / temperature that min-p keeps."""
    smallest = tl.log(tl.maximum(min_p, 1e-30).to(tl.float64)).to(tl.float32)
    return tl.where(min_p > 0.0, smallest, float("-inf"))


@triton.jit
def _left(x, top, inverse, floor, SCALE: tl.constexpr):
    """int64: weights relative to the row's largest, 0 where min-p drops the token."""
    return tl.where((x - top) * inverse >= floor, fixed_weight(x, top, inverse, SCALE), 0)


@triton.jit(do_not_specialize=["each"])
def _begin(
    x_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, work_ptr, key_ptr, kept_ptr, floor_ptr, vocab,
    pieces, each, SCALE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    after_others(AHEAD)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    floor = _floor(tl.load(min_p_ptr + row))
    if part == 0:
        tl.store(key_ptr + row, LOWEST)
        tl.store(kept_ptr + row, everything())
        tl.store(floor_ptr + row, floor)
    temperature, best = tl.load(temperature_ptr + row), row_best(best_ptr, row, pieces, PAD)
    limit, top_p = _limit(tl.load(top_k_ptr + row), vocab), tl.load(top_p_ptr + row)
    if (temperature <= 0.0) | ((limit == vocab) & (top_p >= 1.0)) | (sound(best) == 0):
        return
    work, top, inverse = work_ptr + row * COLUMNS, from_key(best), inverse_of(temperature)
    counts, total = tl.zeros([DEPTHS], tl.int32), tl.full([], 0, tl.int64)
    for piece in range(part * each, tl.minimum(part * each + each, pieces)):
        column = piece * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        x = tl.load(x_ptr + row * vocab + column, mask=inside, other=float("-inf"))
        counts += tl.histogram(depth_of(x, top, inverse), DEPTHS, mask=inside)
        if limit == vocab:
            total += tl.sum(_left(x, top, inverse, floor, SCALE), 0)
    tl.atomic_add(work + DEPTH_AT + tl.arange(0, DEPTHS), counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    tl.atomic_add(work + WEIGHT, total, sem="relaxed")
    if last_of_row(work):
        numbers = depths(work)
        total = tl.load(work + WEIGHT, cache_modifier=".cg")
        tl.store(work + WEIGHT, 0)
        tl.store(work + DONE, 0)
        if limit < vocab:
            look_for_count(work, numbers, limit, best, temperature)
        else:
            lowest = tl.full([], LOWEST, tl.int64)
            look_for_share(work, numbers, vocab, lowest, total, top_p, best, temperature, floor, SCALE)


@triton.jit
def _add_bins(work, bins, value, within):
    """Add the values of tokens within the range to its bins; all at once where they are in one, as of equal logits."""
    first = tl.min(tl.where(within, bins, BINS), 0)
    last = tl.max(tl.where(within, bins, -1), 0)
    if first == last:
        tl.atomic_add(work + first, tl.sum(tl.where(within, value, 0), 0), sem="relaxed")
    else:
        tl.atomic_add(work + bins, value, mask=within, sem="relaxed")


@triton.jit
def _end_count(
    work, key_ptr, kept_ptr, high, place, before, goal, values, column, limit, top_p, best, temperature, floor,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Top-k ends at a key: keep that; then look for top-p's end in what is left, if the row has any."""
    top, inverse = from_key(best), inverse_of(temperature)
    kept = goal - before
    tl.store(key_ptr, (high - place).to(tl.int32))
    tl.store(kept_ptr, kept)
    tl.store(work + MODE, 0)
    if top_p < 1.0:
        each = _left(from_key((high - column).to(tl.int32)), top, inverse, floor, SCALE)
        number = tl.where(column < place, values, tl.where(column == place, kept, 0))
        total = tl.load(work + WEIGHT, cache_modifier=".cg") + tl.sum(tl.where(number > 0, number * each, 0), 0)
        counts = depths(work)
        look_for_share(
            work, counts, count_bin(counts, limit), high - place, total, top_p, best, temperature, floor, SCALE
        )
    tl.store(work + WEIGHT, 0)


@triton.jit
def _end_share(work, key_ptr, kept_ptr, edge, missing, best, temperature, SCALE: tl.constexpr):
    """Top-p ends at a key, whose equals are kept until their weight is what is missing, or top-k ends among them."""
    each = fixed_weight(from_key(edge.to(tl.int32)), from_key(best), inverse_of(temperature), SCALE)
    each = tl.maximum(each, 1)
    kept = tl.maximum((missing + each - 1) // each, 1)
    kept = tl.where(tl.load(key_ptr) == edge, tl.minimum(kept, tl.load(kept_ptr)), kept)
    tl.store(key_ptr, edge.to(tl.int32))
    tl.store(kept_ptr, kept)
    tl.store(work + MODE, 0)


@triton.jit(do_not_specialize=["each"])
def _narrow(
    x_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, work_ptr, key_ptr, kept_ptr, floor_ptr, vocab, pieces,
    each, SCALE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    after_others(AHEAD)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    work = work_ptr + row * COLUMNS
    mode = tl.load(work + MODE)
    if mode == 0:
        return
    low, high, shift, goal = (
        tl.load(work + LOW), tl.load(work + HIGH), tl.load(work + SHIFT), tl.load(work + GOAL)
    )  # fmt: skip
    temperature, best = tl.load(temperature_ptr + row), row_best(best_ptr, row, pieces, PAD)
    floor, top_p = tl.load(floor_ptr + row), tl.load(top_p_ptr + row)
    top, inverse, weighed = from_key(best), inverse_of(temperature), (mode == COUNT) & (top_p < 1.0)
    above, heavy = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for piece in range(part * each, tl.minimum(part * each + each, pieces)):
        if tl.load(best_ptr + row * pieces + piece) >= low:
            column = piece * BLOCK + tl.arange(0, BLOCK)
            inside = column < vocab
            x = tl.load(x_ptr + row * vocab + column, mask=inside, other=float("-inf"))
            key, first, last = order_key(x), low.to(tl.int32), high.to(tl.int32)
            weight = _left(x, top, inverse, floor, SCALE)
            value = tl.where(mode == COUNT, 1, weight)
            higher = inside & (key > last)
            above += tl.sum(tl.where(higher, value, 0), 0)
            if weighed:
                heavy += tl.sum(tl.where(higher, weight, 0), 0)
            within = inside & (key >= first) & (key <= last) & (value > 0)
            below = (last - key).to(tl.uint32, bitcast=True)  # up to 32 bits of range
            _add_bins(work, (below >> shift.to(tl.uint32)).to(tl.int32), value, within)
    tl.atomic_add(work + ABOVE, above, mask=above > 0, sem="relaxed")
    tl.atomic_add(work + WEIGHT, heavy, mask=heavy > 0, sem="relaxed")
    if last_of_row(work):
        bins = tl.arange(0, BINS)
        place, before, values = at_goal(work, goal, bins)
        if shift > 0:
            high -= place << shift
            low = tl.maximum(low, high - (tl.full([], 1, tl.int64) << shift) + 1)
            tl.store(work + WEIGHT, 0)
            look_between(work, mode, goal, low, high)
        elif mode == COUNT:
            limit = _limit(tl.load(top_k_ptr + row), vocab)
            _end_count(
                work, key_ptr + row, kept_ptr + row, high, place, before, goal, values, bins, limit, top_p, best,
                temperature, floor, SCALE,
            )  # fmt: skip
        else:
            _end_share(work, key_ptr + row, kept_ptr + row, high - place, goal - before, best, temperature, SCALE)


@dataclass(frozen=True, eq=False)
class Edges:
    """What the filters of R rows keep: logits above a key, and of its equals the first ones by id.

    Attributes:
        key: int32 [R], of the last logit that is kept. kept: int64 [R], how many of those that have it.
        floor: float32 [R], lowest (logit - max) / temperature that min-p keeps.
    """

    key: torch.Tensor
    kept: torch.Tensor
    floor: torch.Tensor


def edges_of(
    x: torch.Tensor, temperature: torch.Tensor, inputs: SamplingInputs, pieces: Pieces, programs: int = PROGRAMS
) -> Edges:
    """Of adjusted logits float32 [R, V] whose pieces these are, by about so many programs a launch."""
    rows, vocab = x.shape
    device, count, block = x.device, pieces.count, pieces.block
    asked = (temperature, inputs.top_k.contiguous(), inputs.top_p.contiguous())
    work = torch.zeros((rows, COLUMNS.value), dtype=torch.int64, device=device)
    found = Edges(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
    each = triton.cdiv(count, min(count, triton.cdiv(programs, rows)))
    grid = (rows, triton.cdiv(count, each))
    sizes = {"SCALE": scale_of(vocab), "PAD": pieces.pad, "BLOCK": block, **ahead(x)}
    _begin[grid](
        x, pieces.best, *asked, inputs.min_p.contiguous(), work, found.key, found.kept, found.floor, vocab, count, each,
        **sizes, num_warps=warps_of(2 * block),
    )  # fmt: skip
    for _ in range(_NARROWINGS):
        # Many warps, as a program holds all bins in registers in the end.
        _narrow[grid](
            x, pieces.best, *asked, work, found.key, found.kept, found.floor, vocab, count, each, **sizes,
            num_warps=min(max(block // 128, 4), 16),
        )  # fmt: skip
    return found
