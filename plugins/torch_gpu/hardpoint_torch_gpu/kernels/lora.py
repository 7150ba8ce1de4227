"""Low-rank adapters, one of several per token: x goes down to the rank, and from there into y.

A program has a block of tokens and multiplies them by each adapter that any of them has: blocks of one prompt have one,
those of decodes several, of which some go down at once, side by side. A row keeps the sums of its own adapter alone, so
that no adapter's numbers reach the tokens of another. Where tokens are few the columns of x are split; the launch that
goes up adds the shares in order, or, where many of its programs would, one in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.sample_pieces import BEYOND
from hardpoint_torch_gpu.limits import Limits, limits_of

#: Tokens from which on blocks are large.
_MANY = 128
#: Programs that the first launch should have, and columns that one of them has at least.
_PROGRAMS, _LEAST_COLUMNS = 256, 512
#: Ranks of a step, and steps of columns that are loaded ahead.
_RANKS, _STAGES = 64, 3
#: Adapters side by side, and ranks of all of them.
_GROUPS, _SIDE_BY_SIDE = 4, 128
#: Numbers that a program of the launch in between adds up, and shares that it reads at once.
_JOINED, _SHARES = 256, tl.constexpr(8)


@dataclass(frozen=True)
class LoraCut:
    """How the work is cut.

    Attributes:
        tokens: per program.
        rows: outputs per program of the second launch.
        ranks, columns: per step; groups: adapters side by side, each with so many ranks.
        splits: shares of the columns of x.
        steps: of columns per share.
    """

    tokens: int
    rows: int
    ranks: int
    groups: int
    columns: int
    splits: int
    steps: int


def cutting(tokens: int, columns: int, rank: int, itemsize: int, limits: Limits) -> LoraCut:
    """For x of [tokens, columns] with numbers of `itemsize` bytes and adapters of `rank`."""
    narrow, many = itemsize == 2, tokens > _MANY
    ranks = min(max(int(triton.next_power_of_2(rank)), 16), _RANKS)
    height, rows, step = (64, 128, 128) if many else (16, 64, 128)
    if not narrow:  # products that no tensor core makes fill the registers
        height, rows, ranks, step = min(height, 32), 64, min(ranks, 32), 32
    elif many and not limits.eases(rows * ranks * itemsize):
        height, rows, step = 32, 64, limits.columns(64, step, itemsize)
    groups = min(_GROUPS, _SIDE_BY_SIDE // ranks) if narrow and not limits.operand_bytes else 1
    blocks = triton.cdiv(tokens, height) * triton.cdiv(rank, ranks)
    wanted = max(min(_PROGRAMS // blocks, columns // _LEAST_COLUMNS), 1)
    steps = triton.cdiv(triton.cdiv(columns, step), wanted)
    return LoraCut(height, rows, ranks, groups, step, triton.cdiv(columns, step * steps), steps)


@triton.jit
def _adapters(slots_ptr, token, tokens, adapters):
    """int32: the adapter of each token, -1 where there is none."""
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    return tl.where((slot >= 0) & (slot < adapters), slot, -1).to(tl.int32)


@triton.jit
def _next(slot, last):
    """The lowest adapter of a block above `last`, BEYOND after the last one."""
    return tl.min(tl.where(slot > last, slot, BEYOND), 0)


@triton.jit
def _side_by_side(slot, last, r, RANKS: tl.constexpr, GROUPS: tl.constexpr):
    """int32: the adapters of columns, GROUPS of them above `last`, BEYOND where there are no more; and the last one."""
    found = tl.zeros_like(r) + BEYOND
    for group in tl.static_range(GROUPS):
        last = _next(slot, last)
        found = tl.where(r // RANKS == group, last, found)
    return found, last


@triton.jit(do_not_specialize=["tokens", "steps"])
def _shrink(
    x_ptr, slots_ptr, a_ptr, parts_ptr, tokens, columns, rank, adapters, steps, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """parts [splits, T, r] in float32, of tokens with an adapter."""
    split, tile = tl.program_id(1), tl.program_id(2)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    wide, k = tl.arange(0, GROUPS * BLOCK_R), tl.arange(0, BLOCK_K)
    own_rank = tile * BLOCK_R + wide % BLOCK_R
    begin = split * steps * BLOCK_K
    after_others(AHEAD)
    slot = _adapters(slots_ptr, token, tokens, adapters)
    x_start = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * columns + begin + k[None, :]
    a_start = a_ptr + tl.minimum(own_rank, rank - 1).to(tl.int64)[None, :] * columns + begin + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    adapter, last = _side_by_side(slot, -1, wide, BLOCK_R, GROUPS)
    while tl.min(adapter, 0) < BEYOND:
        there = adapter < BEYOND
        own = a_start + (tl.where(there, adapter, 0).to(tl.int64) * rank * columns)[None, :]
        total = tl.zeros((BLOCK_M, GROUPS * BLOCK_R), tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            at = step * BLOCK_K
            if EVEN:
                x, a = tl.load(x_start + at), tl.load(own + at, mask=there[None, :], other=0.0)
            else:
                inside = k < columns - begin - at
                x = tl.load(x_start + at, mask=inside[None, :], other=0.0)
                a = tl.load(own + at, mask=inside[:, None] & there[None, :], other=0.0)
            total = tl.dot(x, a, total, input_precision="ieee")
        if GROUPS == 1:
            sums = tl.where(slot[:, None] == adapter[None, :], total, sums)
        else:
            mine = tl.where(slot[:, None] == adapter[None, :], total, 0.0)
            sums += tl.sum(mine.reshape(BLOCK_M, GROUPS, BLOCK_R), 1)  # of each row one group at most is not 0
        adapter, last = _side_by_side(slot, last, wide, BLOCK_R, GROUPS)
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    place = (split * tokens + token).to(tl.int64)[:, None] * rank + r[None, :]
    tl.store(parts_ptr + place, sums, mask=(slot >= 0)[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["size", "splits"])
def _join(parts_ptr, h_ptr, size, splits, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """h [T, r], the sum of parts [splits, T, r]. size: T * r."""
    place, share = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, _SHARES)
    total = tl.zeros((BLOCK,), tl.float32)
    after_others(AHEAD)
    for first in range(0, splits, _SHARES):
        part = parts_ptr + (first + share).to(tl.int64)[:, None] * size + place[None, :]
        mask = (first + share < splits)[:, None] & (place < size)[None, :]
        total += tl.sum(tl.load(part, mask=mask, other=0.0), 0)
    tl.store(h_ptr + place, total.to(h_ptr.dtype.element_ty), mask=place < size)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _expand(
    parts_ptr, slots_ptr, b_ptr, y_ptr, tokens, rows, rank, adapters, splits, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """y of tokens with an adapter gets its product with the sum of the parts."""
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    after_others(AHEAD)
    slot = _adapters(slots_ptr, token, tokens, adapters)
    adapted = (slot >= 0)[:, None]
    place = y_ptr + token.to(tl.int64)[:, None] * y_stride + n[None, :]
    mask = adapted & (n < rows)[None, :]
    y = tl.load(place, mask=mask, other=0.0)  # under way while the products are made
    b_start = b_ptr + tl.minimum(n, rows - 1).to(tl.int64)[None, :] * rank
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        share = parts_ptr + token.to(tl.int64)[:, None] * rank + r[None, :]
        inner = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in range(splits):
            part = tl.load(share + split * tokens * rank, mask=adapted & (r < rank)[None, :], other=0.0)
            inner += part.to(tl.float32)
        h = inner.to(b_ptr.dtype.element_ty)
        adapter = _next(slot, -1)
        while adapter < BEYOND:
            own = b_start + adapter.to(tl.int64) * rows * rank
            b = tl.load(own + r[:, None], mask=(r < rank)[:, None], other=0.0)
            total = tl.dot(h, b, sums, input_precision="ieee")
            sums = tl.where((slot == adapter)[:, None], total, sums)
            adapter = _next(slot, adapter)
    tl.store(place, (y.to(tl.float32) + sums).to(y_ptr.dtype.element_ty), mask=mask)


def add_adapters(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """y[t] += b[slots[t]] (a[slots[t]] x[t]), in place; what goes between the products is rounded to x's dtype.

    Args:
        y: [T, N], of stride 1 along N. x: [T, K]. Both float, of the dtype of a and b.
        slots: int64 [T], contiguous; tokens whose slot is not in [0, S) stay as they are.
        a: [S, r, K] and b: [S, N, r], contiguous.
    """
    (tokens, columns), (adapters, rank, _), rows = x.shape, a.shape, b.shape[1]
    if not tokens or not rank:
        return
    limits = limits_of(x.device)
    x, cut = x.contiguous(), cutting(tokens, columns, rank, x.itemsize, limits)
    blocks, tiles = triton.cdiv(tokens, cut.tokens), triton.cdiv(rank, cut.ranks)
    parts = torch.empty((cut.splits, tokens, rank), dtype=torch.float32, device=x.device)
    stages = limits.stages(_STAGES, (cut.tokens + cut.groups * cut.ranks) * cut.columns * x.itemsize)
    _shrink[(blocks, cut.splits, tiles)](
        x, slots, a, parts, tokens, columns, rank, adapters, cut.steps,
        EVEN=columns == cut.splits * cut.steps * cut.columns, BLOCK_M=cut.tokens, BLOCK_R=cut.ranks,
        GROUPS=cut.groups, BLOCK_K=cut.columns, STAGES=stages, num_warps=4, **ahead(x),
    )  # fmt: skip
    splits = cut.splits
    if tokens > _MANY:
        h = torch.empty((tokens, rank), dtype=x.dtype, device=x.device)
        _join[(triton.cdiv(tokens * rank, _JOINED),)](
            parts, h, tokens * rank, splits, BLOCK=_JOINED, num_warps=4, **ahead(x)
        )  # fmt: skip
        parts, splits = h, 1
    _expand[(triton.cdiv(rows, cut.rows), blocks)](
        parts, slots, b, y, tokens, rows, rank, adapters, splits, y.stride(0), BLOCK_M=cut.tokens,
        BLOCK_N=cut.rows, BLOCK_R=cut.ranks, num_warps=4, **ahead(x),
    )  # fmt: skip
