"""Logits of a row in bins by how far they lie below its largest, and in which of them its filters can end.

The weights in a bin differ by a known factor, so numbers of tokens bound sums of weights from both sides. Bins of an
eighth of a nat narrow the place down to a few; these, where they hold many tokens, are divided once more. Bounds are
float32 with room for its errors: they decide only where to look. A row's counts and sums are in a stretch of int64 of
its own, whose columns are told here; nothing read from it becomes an address.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.sample_pieces import fixed_weight, sound

#: Bins of logits, the last one without an end, and how many hold a factor of e in weight.
BINS: tl.constexpr = tl.constexpr(128)
_PER: tl.constexpr = tl.constexpr(8.0)
#: Parts into which the bins are divided that a filter can end in: of like size, or, where the last bin is among them,
#: by the leading bits of the depth, eight to a power of two; and deeper than any of those.
FINE: tl.constexpr = tl.constexpr(128)
_EIGHTHS: tl.constexpr = tl.constexpr(20)
_DEEPEST: tl.constexpr = tl.constexpr(1e12)
#: What float32 may be wrong by in a bound of a sum of weights, and in how deep min-p ends.
_SLACK: tl.constexpr = tl.constexpr(1e-3)
_FINE_SLACK: tl.constexpr = tl.constexpr(1e-4)
_NEAR: tl.constexpr = tl.constexpr(1e-4)

#: Columns of a row: tokens per bin, then per part; the weight of all, that above the bins, that above the list; how
#: many tokens are listed, and their largest key and the smallest one's opposite, both plus OFFSET where there are any.
FINE_AT: tl.constexpr = tl.constexpr(128)
TOTAL: tl.constexpr = tl.constexpr(256)
HEAD: tl.constexpr = tl.constexpr(257)
ABOVE: tl.constexpr = tl.constexpr(258)
LISTED: tl.constexpr = tl.constexpr(259)
HIGHEST: tl.constexpr = tl.constexpr(260)
LOWEST_OF: tl.constexpr = tl.constexpr(261)
#: Where the filters can end, as one launch decided it for all after it: float32 sums differ with the launch that makes
#: them. First and last bin, tokens in them and above; first and last part, tokens above.
FIRST: tl.constexpr = tl.constexpr(262)
LAST: tl.constexpr = tl.constexpr(263)
WITHIN: tl.constexpr = tl.constexpr(264)
NUMBER: tl.constexpr = tl.constexpr(265)
FINE_FIRST: tl.constexpr = tl.constexpr(266)
FINE_LAST: tl.constexpr = tl.constexpr(267)
FINE_NUMBER: tl.constexpr = tl.constexpr(268)
COLUMNS: tl.constexpr = tl.constexpr(272)
OFFSET: tl.constexpr = tl.constexpr(1 << 32)


@triton.jit
def limit_of(top_k, vocab):
    """Tokens that top-k keeps."""
    return tl.where((top_k <= 0) | (top_k > vocab), vocab, top_k).to(tl.int32)


@triton.jit
def searched(temperature, limit, top_p, best, vocab):
    """Whether a row's filters need more than a comparison per token."""
    return (temperature > 0.0) & ((limit < vocab) | (top_p < 1.0)) & sound(best)


@triton.jit
def floor_of(min_p):
    """Lowest (logit - max) / temperature that min-p keeps."""
    smallest = tl.log(tl.maximum(min_p, 1e-30).to(tl.float64)).to(tl.float32)
    return tl.where(min_p > 0.0, smallest, float("-inf"))


@triton.jit
def weight_left(x, top, inverse, floor, SCALE: tl.constexpr):
    """int64: weights relative to the row's largest, 0 where min-p drops the token."""
    return tl.where((x - top) * inverse >= floor, fixed_weight(x, top, inverse, SCALE), 0)


@triton.jit
def depth_of(x, top, inverse):
    """How far logits lie below the largest, in bins, float32; it never falls as logits do."""
    return (top - x) * inverse * _PER


@triton.jit
def bin_of(depth):
    """int32, from 0 to BINS - 1, whatever the depth; the last one where it is not a number."""
    return tl.maximum(tl.where(depth < BINS - 1.0, depth, BINS - 1.0).to(tl.int32), 0)


@triton.jit
def fine_of(depth, first, last):
    """Part of each logit where the bins from `first` to `last` are divided: int32, from 0 to FINE - 1, in any case."""
    start = first.to(tl.float32)
    if last == BINS - 1:
        start = tl.maximum(start, 1.0)
        shallow = tl.where(depth < _DEEPEST, depth, _DEEPEST)
        place = (shallow.to(tl.int32, bitcast=True) - start.to(tl.int32, bitcast=True)) >> _EIGHTHS
    else:
        share = (depth - start) * (1.0 / (last - first + 1).to(tl.float32) * FINE)
        place = tl.where(share < FINE - 1.0, share, FINE - 1.0).to(tl.int32)
    return tl.maximum(tl.minimum(place, FINE - 1), 0)


@triton.jit
def _begin_of(place, first, last):
    """The depth at which parts begin, float32."""
    start = first.to(tl.float32)
    if last == BINS - 1:
        bits = tl.maximum(start, 1.0).to(tl.int32, bitcast=True) + (place << _EIGHTHS)
        begin = tl.where(place == 0, start, bits.to(tl.float32, bitcast=True))
    else:
        begin = start + place.to(tl.float32) * ((last - first + 1).to(tl.float32) / FINE)
    return begin


@triton.jit
def _ends(
    counts, begin, end, number, head, beyond, limit, total, top_p, floor, vocab, SLACK: tl.constexpr,
    UNIT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """First and last bin in which a filter can end, int32, both from 0 to SIZE - 1.

    counts: int64 [SIZE]; begin, end: nats below the largest; number, head: tokens above the bins and their weight;
    beyond: at most what tokens below the bins weigh; total: the weight of all where top-k does not end before.
    """
    place, amount, lowest = tl.arange(0, SIZE), counts.to(tl.float32), -floor
    most = tl.where(begin <= lowest * (1.0 + _NEAR) + _NEAR, amount * tl.exp(-begin) * (1.0 + SLACK), 0.0)
    certain = tl.maximum(tl.exp(-end) * (1.0 - SLACK) - UNIT, 0.0)
    least = tl.where(end < lowest * (1.0 - _NEAR) - _NEAR, amount * certain, 0.0)
    limited = limit < vocab
    k_bin = tl.minimum(tl.sum((number + tl.cumsum(counts, 0) < limit).to(tl.int32), 0), SIZE - 1)
    most = tl.where(limited & (place > k_bin), 0.0, most)
    least = tl.where(limited & (place >= k_bin), 0.0, least)
    large = tl.where(limited, head + tl.sum(most, 0), total)
    small = tl.where(limited, head + tl.sum(least, 0), total)
    # It ends in the first bin that reaches the goal: added up from the top, or from below by what may be left out.
    goal, enough = top_p * small * (1.0 - SLACK), top_p * large * (1.0 + SLACK) + 2.0 * UNIT
    first = tl.sum((head + tl.cumsum(most, 0) < goal).to(tl.int32), 0)
    last = tl.sum((head + tl.cumsum(least, 0) < enough).to(tl.int32), 0)
    rest, room = (1.0 - top_p) * small * (1.0 - SLACK) - 2.0 * UNIT, (1.0 - top_p) * large * (1.0 + SLACK) + UNIT
    first = tl.maximum(first, tl.sum((tl.cumsum(least, 0, reverse=True) > room).to(tl.int32), 0) - 1)
    last = tl.minimum(last, tl.sum((beyond + tl.cumsum(most, 0, reverse=True) > rest).to(tl.int32), 0) - 1)
    last = tl.where(limited, k_bin, tl.maximum(tl.minimum(last, SIZE - 1), 0))
    first = tl.where(top_p < 1.0, tl.maximum(tl.minimum(first, last), 0), last)
    return first, last


@triton.jit
def first_range(work, limit, top_p, floor, vocab, SCALE: tl.constexpr):
    """First and last bin in which the row's filters can end, how many tokens are in them, and how many above.

    To be decided in one launch.
    """
    place = tl.arange(0, BINS)
    counts = tl.load(work + place)
    begin = place.to(tl.float32) / _PER
    end = tl.where(place < BINS - 1, begin + 1.0 / _PER, float("inf"))
    total = tl.load(work + TOTAL).to(tl.float32) * (1.0 / SCALE)
    none = tl.full([], 0, tl.int64)
    first, last = _ends(
        counts, begin, end, none, 0.0, 0.0, limit, total, top_p, floor, vocab, _SLACK, 1.0 / SCALE, BINS
    )
    within = tl.sum(tl.where((place >= first) & (place <= last), counts, 0), 0)
    return first, last, within, tl.sum(tl.where(place < first, counts, 0), 0)


@triton.jit
def keep_bins(work, first, last, within, number):
    """For the launches after this one."""
    tl.store(work + FIRST, first.to(tl.int64))
    tl.store(work + LAST, last.to(tl.int64))
    tl.store(work + WITHIN, within)
    tl.store(work + NUMBER, number)


@triton.jit
def kept_bins(work):
    """First and last bin, int32, as an earlier launch kept them."""
    return tl.load(work + FIRST).to(tl.int32), tl.load(work + LAST).to(tl.int32)


@triton.jit
def last_range(work, first, last, limit, top_p, floor, vocab, SCALE: tl.constexpr, MANY: tl.constexpr):
    """First and last part of the bins in which filters can end, and tokens above them. To be decided in one launch."""
    number = tl.load(work + NUMBER)
    fine_first, fine_last = tl.full([], 0, tl.int32), tl.full([], FINE - 1, tl.int32)
    if tl.load(work + WITHIN) > MANY:
        place = tl.arange(0, FINE)
        counts = tl.load(work + FINE_AT + place)
        begin, end = _begin_of(place, first, last) / _PER, _begin_of(place + 1, first, last) / _PER
        end = tl.where((place == FINE - 1) & (last == BINS - 1), float("inf"), end)
        total = tl.load(work + TOTAL).to(tl.float32) * (1.0 / SCALE)
        head = tl.load(work + HEAD).to(tl.float32) * (1.0 / SCALE)
        beyond = tl.where(limit < vocab, 0.0, float("inf"))
        fine_first, fine_last = _ends(
            counts, begin, end, number, head, beyond, limit, total, top_p, floor, vocab, _FINE_SLACK, 1.0 / SCALE, FINE
        )
        number += tl.sum(tl.where(place < fine_first, counts, 0), 0)
    return fine_first, fine_last, number


@triton.jit
def keep_parts(work, first, last, number):
    """For the launches after this one."""
    tl.store(work + FINE_FIRST, first.to(tl.int64))
    tl.store(work + FINE_LAST, last.to(tl.int64))
    tl.store(work + FINE_NUMBER, number)


@triton.jit
def kept_parts(work):
    """First and last part, int32, and tokens above them, int64, as an earlier launch kept them."""
    number = tl.load(work + FINE_NUMBER)
    return tl.load(work + FINE_FIRST).to(tl.int32), tl.load(work + FINE_LAST).to(tl.int32), number


@triton.jit
def where_in(x, top, inverse, first, last, fine_first, fine_last):
    """Whether logits lie above the parts of the bins from `first` to `last`, and whether in them."""
    depth = depth_of(x, top, inverse)
    place, fine = bin_of(depth), fine_of(depth, first, last)
    near = (place >= first) & (place <= last)
    return (place < first) | (near & (fine < fine_first)), near & (fine >= fine_first) & (fine <= fine_last)
