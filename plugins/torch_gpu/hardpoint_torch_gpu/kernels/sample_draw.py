"""The draw: the piece of the vocabulary in which u * total lies, then the token in it. Nothing is sorted.

The random number is the canonical one: SplitMix64's finalizer (Steele, Lea, Flood 2014) of (seed, position).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_platforms.batch import SamplingInputs
from hardpoint_torch_gpu.kernels.sample_filter import Edges
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
    sound,
    warps_of,
)

_STEP: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND: tl.constexpr = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _uniform(seed, position):
    """float64 in [0, 1), multiples of 2**-48, from int64 scalars."""
    bits = _mix(_mix(seed + _STEP) + (position + 1) * _STEP)
    return ((bits >> 16) & ((1 << 48) - 1)).to(tl.float64) * (1.0 / (1 << 48))


@triton.jit
def _weights(
    x_ptr, edge_ptr, floor_ptr, row, column, vocab, taken, piece_best, top, inverse, SCALE: tl.constexpr,
    FILTERS: tl.constexpr,
):  # fmt: skip
    """int64 like `column`: weights relative to the piece's best, 0 where a filter drops the token.

    taken: how many of the piece's tokens at the edge are kept.
    """
    x = tl.load(x_ptr + row * vocab + column, mask=column < vocab, other=float("-inf"))
    weight = fixed_weight(x, piece_best, inverse, SCALE)
    if FILTERS:
        edge, key = tl.load(edge_ptr + row), order_key(x)
        level = (column < vocab) & (key == edge)
        kept = (key > edge) | (level & (tl.cumsum(level.to(tl.int32), 0) <= taken))
        kept = kept & ((x - top) * inverse >= tl.load(floor_ptr + row))
        weight = tl.where(kept, weight, 0)
    return weight


@triton.jit
def _kept(
    x_ptr, best_ptr, temperature_ptr, edge_ptr, floor_ptr, sum_ptr, equal_ptr, vocab, pieces, SCALE: tl.constexpr,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight of what lies above the row's edge, relative to the piece's best, and the number of equals at it."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        return
    place, edge, floor = row * pieces + piece, tl.load(edge_ptr + row), tl.load(floor_ptr + row)
    top, inverse = from_key(row_best(best_ptr, row, pieces, PAD)), inverse_of(temperature)
    best = tl.load(best_ptr + place)
    if (best < edge) | ((from_key(best) - top) * inverse < floor):  # nothing of the piece is kept
        tl.store(sum_ptr + place, tl.full([], 0, tl.int64))
        tl.store(equal_ptr + place, 0)
    else:
        x, _, inside = piece_of(x_ptr, row, piece, vocab, BLOCK)
        key, weight = order_key(x), fixed_weight(x, from_key(best), inverse, SCALE)
        above = (key > edge) & ((x - top) * inverse >= floor)
        tl.store(sum_ptr + place, tl.sum(tl.where(above, weight, 0), 0))
        tl.store(equal_ptr + place, tl.sum((inside & (key == edge)).to(tl.int32), 0))


@triton.jit
def _draw(
    x_ptr, best_ptr, at_ptr, raw_ptr, sum_ptr, temperature_ptr, seeds_ptr, positions_ptr, edge_ptr, kept_ptr,
    floor_ptr, equal_ptr, ids_ptr, finite_ptr, vocab, pieces, SCALE: tl.constexpr, FILTERS: tl.constexpr,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PAD)
    inside = piece < pieces
    keys = tl.load(best_ptr + row * pieces + piece, mask=inside, other=LOWEST)
    at = tl.load(at_ptr + row * pieces + piece, mask=inside, other=BEYOND)
    highest = tl.max(keys, 0)
    token = tl.min(tl.where(keys == highest, at, BEYOND), 0)
    tl.store(finite_ptr + row, sound(row_best(raw_ptr, row, pieces, PAD)).to(tl.int8))
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0.0) & sound(highest):
        top, inverse = from_key(highest), inverse_of(temperature)
        sums = tl.load(sum_ptr + row * pieces + piece, mask=inside, other=0)
        taken = tl.zeros([PAD], tl.int32)
        if FILTERS:
            equal = tl.load(equal_ptr + row * pieces + piece, mask=inside, other=0)
            room = tl.load(kept_ptr + row) - (tl.cumsum(equal, 0) - equal)  # what equals of lower ids leave
            taken = tl.minimum(tl.maximum(room, 0), equal)
            edge = from_key(tl.load(edge_ptr + row))
            taken = tl.where((edge - top) * inverse >= tl.load(floor_ptr + row), taken, 0)
            sums += taken * fixed_weight(edge, from_key(keys), inverse, SCALE)
        rank = (from_key(keys).to(tl.float64) - top.to(tl.float64)) * inverse.to(tl.float64)
        factor = tl.exp(tl.where(sums > 0, rank, 0.0))
        heavy = tl.where(sums > 0, sums.to(tl.float64) * factor, 0.0)
        running = tl.cumsum(heavy, 0)
        goal = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)) * tl.max(running, 0)
        # Where rounding leaves no piece above the goal it is in the last one with weight.
        hit = tl.min(tl.where((running > goal) & (sums > 0), piece, BEYOND), 0)
        chosen = tl.where(hit < BEYOND, hit, tl.max(tl.where(sums > 0, piece, -1), 0))
        if chosen >= 0:
            here = piece == chosen
            before = tl.sum(tl.where(here, running - heavy, 0.0), 0)
            unit = tl.maximum(tl.sum(tl.where(here, factor, 0.0), 0), 1e-300)
            whole = tl.sum(tl.where(here, sums, 0), 0)
            rest = tl.minimum(tl.maximum((goal - before) / unit, 0.0), 4e18).to(tl.int64)
            rest = tl.minimum(rest, whole - 1)
            column = chosen * BLOCK + tl.arange(0, BLOCK)
            best = from_key(tl.max(tl.where(here, keys, LOWEST), 0))
            weight = _weights(
                x_ptr, edge_ptr, floor_ptr, row, column, vocab, tl.sum(tl.where(here, taken, 0), 0), best, top,
                inverse, SCALE, FILTERS,
            )  # fmt: skip
            found = tl.min(tl.where(tl.cumsum(weight, 0) > rest, column, BEYOND), 0)
            token = tl.where(found < BEYOND, found, tl.maximum(tl.max(tl.where(weight > 0, column, -1), 0), 0))
    tl.store(ids_ptr + row, token.to(tl.int64))


def draw(
    x: torch.Tensor, temperature: torch.Tensor, inputs: SamplingInputs, pieces: Pieces, edges: Edges | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [R] of adjusted logits float32 [R, V], and whether the raw ones are finite, bool [R].

    temperature: float32 [R]; pieces: of x, with sums unless there are `edges`. Rows at temperature 0, or without a
    weight that can be drawn, give the first of the largest logits.
    """
    rows, vocab = x.shape
    scale, device = scale_of(vocab), x.device
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.int8, device=device)
    limits = (ids, ids, temperature) if edges is None else (edges.key, edges.kept, edges.floor)
    sums, equal = pieces.sums, ids
    if edges is not None:
        sums = torch.empty((rows, pieces.count), dtype=torch.int64, device=device)
        equal = torch.empty((rows, pieces.count), dtype=torch.int32, device=device)
        _kept[(rows, pieces.count)](
            x, pieces.best, temperature, edges.key, edges.floor, sums, equal, vocab, pieces.count, SCALE=scale,
            PAD=pieces.pad, BLOCK=pieces.block, num_warps=warps_of(pieces.block),
        )  # fmt: skip
    _draw[(rows,)](
        x, pieces.best, pieces.at, pieces.raw, sums, temperature, inputs.seeds.contiguous(),
        inputs.positions.contiguous(), *limits, equal, ids, finite, vocab, pieces.count, SCALE=scale,
        FILTERS=edges is not None, PAD=pieces.pad, BLOCK=pieces.block, num_warps=warps_of(pieces.block),
    )  # fmt: skip
    return ids, finite.view(torch.bool)
