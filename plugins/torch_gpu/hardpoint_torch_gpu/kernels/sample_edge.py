"""The range of keys in which a row's filter ends: where it begins, and what is kept of it from launch to launch.

A row has one stretch of int64 of its own: counts or weights by key, counts by depth, and the fields below. Bounds of
sums are float32 with room for its errors; what is decided by them is only where to look.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.sample_pieces import BEYOND, COLDEST, NEGATIVE_INFINITY, from_key, order_key

#: Parts into which a launch divides a row's range: three launches come down from 32 bits to one key.
BINS: tl.constexpr = tl.constexpr(2048)
_BITS: tl.constexpr = tl.constexpr(11)
#: Bins of depth below the largest logit, the last one without an end, and how many hold a factor of e in weight.
DEPTHS: tl.constexpr = tl.constexpr(256)
_PER: tl.constexpr = tl.constexpr(8.0)
#: What float32 may be wrong by in a bound of a sum of weights, and in the logit at which a depth begins.
_SLACK: tl.constexpr = tl.constexpr(1e-3)
_NEAR: tl.constexpr = tl.constexpr(2.0**-20)

#: Columns of a row: BINS by key, the largest first; DEPTHS by depth; then one each.
DEPTH_AT: tl.constexpr = tl.constexpr(2048)
#: What is looked for: nothing (any more), top-k's end or top-p's.
MODE: tl.constexpr = tl.constexpr(2304)
#: First and last key of the range, and the power of two of keys in a bin.
LOW: tl.constexpr = tl.constexpr(2305)
HIGH: tl.constexpr = tl.constexpr(2306)
SHIFT: tl.constexpr = tl.constexpr(2307)
#: Tokens or weight that the kept ones reach together; what of it lies above the range; the weight above the range.
GOAL: tl.constexpr = tl.constexpr(2308)
ABOVE: tl.constexpr = tl.constexpr(2309)
WEIGHT: tl.constexpr = tl.constexpr(2310)
#: Programs of the row that are done with a launch.
DONE: tl.constexpr = tl.constexpr(2311)
COLUMNS: tl.constexpr = tl.constexpr(2312)

COUNT: tl.constexpr = tl.constexpr(1)
SHARE: tl.constexpr = tl.constexpr(2)


@triton.jit
def depth_of(x, top, inverse):
    """Bin of each logit, int32."""
    return tl.minimum((top - x) * inverse * _PER, DEPTHS - 1.0).to(tl.int32)


@triton.jit
def last_of_row(work):
    """Whether all other programs of the row are done with what they add to it. Asked once by each."""
    tl.debug_barrier()  # the whole program has added before it says so
    return tl.atomic_add(work + DONE, 1, sem="acq_rel") == tl.num_programs(1) - 1


@triton.jit
def look_between(work, mode, goal, low, high):
    """Set what the next launch looks for. low, high: int64, keys; high - low below 2**32."""
    bits = tl.arange(0, 32).to(tl.int64) + _BITS
    tl.store(work + SHIFT, tl.sum((((high - low) >> bits) > 0).to(tl.int32), 0).to(tl.int64))
    tl.store(work + MODE, mode)
    tl.store(work + GOAL, goal)
    tl.store(work + LOW, low)
    tl.store(work + HIGH, high)


@triton.jit
def _between_depths(first, last, best, temperature):
    """int64 keys, low and high, between which all logits of these bins lie, and a few beside them."""
    top = from_key(best)
    step = tl.maximum(temperature, COLDEST) / _PER
    begin, end = first.to(tl.float32) * step, (last + 1).to(tl.float32) * step
    upper = top - begin + (tl.abs(top) + begin) * _NEAR
    upper = tl.where(upper <= top, upper, top)  # so too where it is not a number, of a temperature without end
    lower = top - end - (tl.abs(top) + end) * _NEAR
    high = tl.minimum(tl.where(first == 0, best, order_key(upper) + 4), best).to(tl.int64)
    low = tl.where(last >= DEPTHS - 1, NEGATIVE_INFINITY, order_key(lower)).to(tl.int64)
    return tl.maximum(low - 4, NEGATIVE_INFINITY), high


@triton.jit
def depths(work):
    """int64 [DEPTHS]: tokens by depth, as other programs left them."""
    return tl.load(work + DEPTH_AT + tl.arange(0, DEPTHS), cache_modifier=".cg")


@triton.jit
def count_bin(counts, limit):
    """Bin of depth in which the `limit`-th token lies, int32."""
    return tl.minimum(tl.sum((tl.cumsum(counts, 0) < limit).to(tl.int32), 0), DEPTHS - 1)


@triton.jit
def look_for_count(work, counts, limit, best, temperature):
    """Begin to look for the key of the `limit`-th token."""
    place = count_bin(counts, limit)
    low, high = _between_depths(place, place, best, temperature)
    look_between(work, COUNT, limit.to(tl.int64), low, high)


@triton.jit
def look_for_share(work, counts, deepest, lowest, total, top_p, best, temperature, floor, SCALE: tl.constexpr):
    """Begin to look for the key with which the weight reaches the share `top_p` of `total`.

    counts: of all tokens by depth; deepest: the last bin of which any belong to `total`, whose tokens perhaps do not
    all; lowest: key that they have at least.
    """
    goal = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    rest = tl.maximum(total - goal, 0).to(tl.float32)
    aim = goal.to(tl.float32)
    depth = tl.arange(0, DEPTHS)
    # Bins below min-p weigh nothing; the one it lies in, and its neighbours by rounding, may weigh anything less.
    edge = tl.minimum(-floor * _PER, DEPTHS - 1.0).to(tl.int32)
    number, begin = counts.to(tl.float32), depth.to(tl.float32) / _PER
    most = number * (tl.exp(-begin) * ((1.0 + _SLACK) * SCALE))
    most = tl.where((depth <= edge + 1) & (depth <= deepest), most, 0.0)
    least = number * tl.maximum(tl.exp(-begin - 1.0 / _PER) * ((1.0 - _SLACK) * SCALE) - 1.0, 0.0)
    least = tl.where((depth < edge - 1) & (depth < deepest) & (depth < DEPTHS - 1), least, 0.0)
    # It ends in the first bin that reaches the goal: counted from the top, or from below by what may be left out.
    first = tl.sum((tl.cumsum(most, 0) < aim).to(tl.int32), 0)
    first = tl.maximum(first, tl.sum((tl.cumsum(least, 0, reverse=True) > rest).to(tl.int32), 0) - 1)
    last = tl.sum((tl.cumsum(least, 0) < aim).to(tl.int32), 0)
    last = tl.minimum(last, tl.maximum(tl.sum((tl.cumsum(most, 0, reverse=True) > rest).to(tl.int32), 0) - 1, 0))
    last = tl.minimum(last, tl.minimum(deepest, DEPTHS - 1))
    low, high = _between_depths(tl.minimum(first, last), last, best, temperature)
    low = tl.maximum(low, lowest)
    look_between(work, SHARE, goal, low, tl.maximum(low, high))


@triton.jit
def at_goal(work, goal, column):
    """Which bin reaches the goal, int64; what is above it, int64; what the bins hold, int64 [BINS]. All emptied.

    column: 0 to BINS.
    """
    values = tl.load(work + column, cache_modifier=".cg")
    above = tl.load(work + ABOVE, cache_modifier=".cg")
    tl.store(work + column, tl.zeros([BINS], tl.int64))
    tl.store(work + ABOVE, 0)
    tl.store(work + DONE, 0)
    place = tl.minimum(tl.sum((above + tl.cumsum(values, 0) < goal).to(tl.int32), 0), BINS - 1)
    return place.to(tl.int64), above + tl.sum(tl.where(column < place, values, 0), 0), values


@triton.jit
def everything():
    """A number of tokens that no row has, int64."""
    return tl.full([], BEYOND, tl.int64)
