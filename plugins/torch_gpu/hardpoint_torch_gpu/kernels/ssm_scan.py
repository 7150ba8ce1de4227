"""Mamba-2 over paged state: a token per row in one launch, longer rows in blocks of matrix products.

Within a block of tokens the recurrence is a lower triangular matrix (Dao and Gu 2024, arXiv:2405.21060): what token s
adds to the state reaches token t times the decays between them. A program has some rows of one head's state [p, n].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.wide_dot import wide_dot
from hardpoint_torch_gpu.plan import GpuPlan

#: Tokens of a block, and rows of the state per program with one token and with several: larger blocks spill registers.
_BLOCK, _ROWS, _ROWS_OF_BLOCKS = 32, 16, 32


@dataclass(frozen=True)
class SsmRule:
    """How the length of a step is made of what the model gives: softplus, then bounds."""

    softplus: bool
    low: float
    high: float


@triton.jit
def _step(dt, bias, low, high, SOFTPLUS: tl.constexpr):
    """Lengths of steps, float32."""
    step = dt.to(tl.float32) + bias
    if SOFTPLUS:
        e = tl.exp(-tl.abs(step))
        step = tl.maximum(step, 0.0) + tl.where(e < 1e-4, e - 0.5 * e * e, tl.log(1.0 + e))
    return tl.minimum(tl.maximum(step, low), high)


@triton.jit(do_not_specialize=["table_row"])
def _ssm_decode(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, bias_ptr, state_ptr, table_ptr, starts_ptr, lengths_ptr, y_ptr,
    low, high, table_row, x_row, x_head, dt_row, b_row, b_group, c_row, c_group, page, state_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr,
    SKIP: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    p, head, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    begin, end, length = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1), tl.load(lengths_ptr + row)
    home = tl.load(table_ptr + row.to(tl.int64) * table_row).to(tl.int64)
    rows = p < P
    after_others(AHEAD)
    if end - begin != 1:
        if CLEAR:
            blank = tl.zeros([BLOCK], tl.float32).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + (row.to(tl.int64) * HEADS + head) * P + p, blank, mask=rows)
        return
    n, token, group = tl.arange(0, N_PAD), begin.to(tl.int64), head // SHARED
    columns = n < N
    there = rows[:, None] & columns[None, :]
    place = state_ptr + home * page + head * state_head + p[:, None] * N + n[None, :]
    known = rows[:, None] & (n < tl.where(length > 1, N, 0))[None, :]
    state = tl.load(place, mask=known, other=0.0).to(tl.float32)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + head)
    step = _step(tl.load(dt_ptr + token * dt_row + head), bias, low, high, SOFTPLUS)
    x = tl.load(x_ptr + token * x_row + head * x_head + p, mask=rows, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * b_row + group * b_group + n, mask=columns, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + token * c_row + group * c_group + n, mask=columns, other=0.0).to(tl.float32)
    state = state * tl.exp(step * tl.load(a_ptr + head)) + (step * x)[:, None] * b[None, :]
    tl.store(place, state.to(state_ptr.dtype.element_ty), mask=there)
    y = tl.sum(state * c[None, :], 1)
    if SKIP:
        y += tl.load(d_ptr + head) * x
    tl.store(y_ptr + (token * HEADS + head) * P + p, y.to(y_ptr.dtype.element_ty), mask=rows)


@triton.jit(do_not_specialize=["table_row"])
def _ssm_blocks(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, bias_ptr, state_ptr, table_ptr, starts_ptr, lengths_ptr, y_ptr,
    low, high, table_row, x_row, x_head, dt_row, b_row, b_group, c_row, c_group, page, state_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr,
    SKIP: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    p, head, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    begin, end, length = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1), tl.load(lengths_ptr + row)
    count = end - begin
    if count < 2:
        return
    n, t, group = tl.arange(0, N_PAD), tl.arange(0, TOKENS), head // SHARED
    rows, columns = p < P, n < N
    there = rows[:, None] & columns[None, :]
    home = tl.load(table_ptr + row.to(tl.int64) * table_row).to(tl.int64)
    place = state_ptr + home * page + head * state_head + p[:, None] * N + n[None, :]
    known = rows[:, None] & (n < tl.where(length > count, N, 0))[None, :]
    state = tl.load(place, mask=known, other=0.0).to(tl.float32)
    a, bias, d = tl.load(a_ptr + head), 0.0, 0.0
    if BIAS:
        bias = tl.load(bias_ptr + head)
    if SKIP:
        d = tl.load(d_ptr + head)
    for first in range(0, count, TOKENS):
        real = first + t < count
        token = (begin + first + t).to(tl.int64)
        step = _step(tl.load(dt_ptr + token * dt_row + head, mask=real, other=0.0), bias, low, high, SOFTPLUS)
        step = tl.where(real, step, 0.0)  # a step of no length changes nothing
        wide = real[:, None] & columns[None, :]
        b = tl.load(b_ptr + token[:, None] * b_row + group * b_group + n[None, :], mask=wide, other=0.0)
        c = tl.load(c_ptr + token[:, None] * c_row + group * c_group + n[None, :], mask=wide, other=0.0)
        if not HALVES:
            b, c = b.to(tl.float32), c.to(tl.float32)
        mask = real[:, None] & rows[None, :]
        x = tl.load(x_ptr + token[:, None] * x_row + head * x_head + p[None, :], mask=mask, other=0.0).to(tl.float32)
        added = x * step[:, None]
        running, whole = tl.cumsum(step * a, 0), tl.sum(step * a, 0)
        between = tl.where(t[:, None] >= t[None, :], running[:, None] - running[None, :], float("-inf"))
        square, flat = tl.zeros([TOKENS, TOKENS], tl.float32), tl.zeros([TOKENS, BLOCK], tl.float32)
        reach = wide_dot(c, tl.trans(b), square, HALVES) * tl.exp(between)
        y = wide_dot(c, tl.trans(state), flat, HALVES) * tl.exp(running)[:, None]
        y = wide_dot(reach, added, y, HALVES) + d * x
        target = y_ptr + (token[:, None] * HEADS + head) * P + p[None, :]
        tl.store(target, y.to(y_ptr.dtype.element_ty), mask=mask)
        late = added * tl.exp(whole - running)[:, None]
        state = wide_dot(tl.trans(late), b, state * tl.exp(whole), HALVES)
    tl.store(place, state.to(state_ptr.dtype.element_ty), mask=there)


def ssm_scan(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    rule: SsmRule,
    cache: torch.Tensor,
    plan: GpuPlan,
    group: int,
    y: torch.Tensor,
) -> None:
    """inputs: x [T, h, p], dt [T, h], b and c [T, g, n]; weights: float32 a, d and bias of dt, [h] each; into y.

    cache [pages, page, h, p * n] gets the new states.
    """
    x, dt, b, c = inputs
    a, d, bias = weights
    _, heads, width = x.shape
    groups, size = b.shape[1:]
    table, rows, tiles = plan.tables[group], len(plan.lengths), len(plan.tile_rows)
    given = (
        x, dt, b, c, a, a if d is None else d, a if bias is None else bias, cache, table, plan.starts, plan.lengths, y,
        rule.low, rule.high, table.stride(0), x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1),
        c.stride(0), c.stride(1), cache.stride(0), cache.stride(2),
    )  # fmt: skip
    shape = {
        "HEADS": heads, "SHARED": heads // groups, "P": width, "N": size,
        "N_PAD": max(16, triton.next_power_of_2(size)), "SKIP": d is not None, "BIAS": bias is not None,
        "SOFTPLUS": rule.softplus,
    }  # fmt: skip
    if len(plan.parts):
        _ssm_decode[(triton.cdiv(width, _ROWS), heads, rows)](
            *given, **shape, CLEAR=not tiles and rows == len(x), BLOCK=_ROWS, num_warps=2, **ahead(x)
        )
    if tiles:
        _ssm_blocks[(triton.cdiv(width, _ROWS_OF_BLOCKS), heads, rows)](
            *given, **shape, BLOCK=_ROWS_OF_BLOCKS, TOKENS=_BLOCK,
            HALVES=x.dtype is torch.bfloat16, num_warps=4, num_stages=2,
        )  # fmt: skip
