"""Low-rank adapters, one of several per token: x goes down to the rank, and from there into y; two launches.

A program has a block of tokens and multiplies them by each adapter that any of them has, one after the other: blocks
of one prompt have one, those of decodes several. A row keeps the sums of its own adapter alone, so that no adapter's
numbers reach the tokens of another. Where tokens are few the columns of x are split; the second launch adds the
shares in order.
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


@dataclass(frozen=True)
class LoraCut:
    """How the work is cut.

    Attributes:
        tokens: per program.
        rows: outputs per program of the second launch.
        ranks, columns: per step.
        splits: shares of the columns of x.
        steps: of columns per share.
    """

    tokens: int
    rows: int
    ranks: int
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
    blocks = triton.cdiv(tokens, height) * triton.cdiv(rank, ranks)
    wanted = max(min(_PROGRAMS // blocks, columns // _LEAST_COLUMNS), 1)
    steps = triton.cdiv(triton.cdiv(columns, step), wanted)
    return LoraCut(height, rows, ranks, step, triton.cdiv(columns, step * steps), steps)


@triton.jit
def _adapters(slots_ptr, token, tokens, adapters):
    """int32: the adapter of each token, -1 where there is none."""
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    return tl.where((slot >= 0) & (slot < adapters), slot, -1).to(tl.int32)


@triton.jit
def _next(slot, last):
    """The lowest adapter of a block above `last`, BEYOND after the last one."""
    return tl.min(tl.where(slot > last, slot, BEYOND), 0)


@triton.jit(do_not_specialize=["tokens", "steps"])
def _shrink(
    x_ptr, slots_ptr, a_ptr, parts_ptr, tokens, columns, rank, adapters, steps, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """parts [splits, T, r] in float32, of tokens with an adapter."""
    split, tile = tl.program_id(1), tl.program_id(2)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    r, k = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    begin = split * steps * BLOCK_K
    after_others(AHEAD)
    slot = _adapters(slots_ptr, token, tokens, adapters)
    x_start = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * columns + begin + k[None, :]
    a_start = a_ptr + tl.minimum(r, rank - 1).to(tl.int64)[None, :] * columns + begin + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    adapter = _next(slot, -1)
    while adapter < BEYOND:
        own = a_start + adapter.to(tl.int64) * rank * columns
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            at = step * BLOCK_K
            if EVEN:
                x, a = tl.load(x_start + at), tl.load(own + at)
            else:
                inside = k < columns - begin - at
                x = tl.load(x_start + at, mask=inside[None, :], other=0.0)
                a = tl.load(own + at, mask=inside[:, None], other=0.0)
            total = tl.dot(x, a, total, input_precision="ieee")
        sums = tl.where((slot == adapter)[:, None], total, sums)
        adapter = _next(slot, adapter)
    place = (split * tokens + token).to(tl.int64)[:, None] * rank + r[None, :]
    tl.store(parts_ptr + place, sums, mask=(slot >= 0)[:, None] & (r < rank)[None, :])


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
    b_start = b_ptr + tl.minimum(n, rows - 1).to(tl.int64)[None, :] * rank
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        share = parts_ptr + token.to(tl.int64)[:, None] * rank + r[None, :]
        inner = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in range(splits):
            inner += tl.load(share + split * tokens * rank, mask=adapted & (r < rank)[None, :], other=0.0)
        h = inner.to(b_ptr.dtype.element_ty)
        adapter = _next(slot, -1)
        while adapter < BEYOND:
            own = b_start + adapter.to(tl.int64) * rows * rank
            b = tl.load(own + r[:, None], mask=(r < rank)[:, None], other=0.0)
            total = tl.dot(h, b, sums, input_precision="ieee")
            sums = tl.where((slot == adapter)[:, None], total, sums)
            adapter = _next(slot, adapter)
    place = y_ptr + token.to(tl.int64)[:, None] * y_stride + n[None, :]
    mask = adapted & (n < rows)[None, :]
    y = tl.load(place, mask=mask, other=0.0).to(tl.float32) + sums
    tl.store(place, y.to(y_ptr.dtype.element_ty), mask=mask)


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
    stages = limits.stages(_STAGES, (cut.tokens + cut.ranks) * cut.columns * x.itemsize)
    _shrink[(blocks, cut.splits, tiles)](
        x, slots, a, parts, tokens, columns, rank, adapters, cut.steps,
        EVEN=columns == cut.splits * cut.steps * cut.columns, BLOCK_M=cut.tokens, BLOCK_R=cut.ranks,
        BLOCK_K=cut.columns, STAGES=stages, num_warps=4, **ahead(x),
    )  # fmt: skip
    _expand[(triton.cdiv(rows, cut.rows), blocks)](
        parts, slots, b, y, tokens, rows, rank, adapters, cut.splits, y.stride(0), BLOCK_M=cut.tokens,
        BLOCK_N=cut.rows, BLOCK_R=cut.ranks, num_warps=4, **ahead(x),
    )  # fmt: skip
