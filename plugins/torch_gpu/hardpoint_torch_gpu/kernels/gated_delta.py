"""The gated delta rule over paged state: a token per row in one launch, longer rows in blocks of matrix products.

What the tokens of a block write to the state depends on each other linearly, (1 + M) u = w with M strictly lower
triangular (Yang et al. 2024, arXiv:2412.06464). The inverse of 1 + M and what the tokens of a block see of each other
know no state: one launch makes them for all blocks at once, and a second one walks each row's blocks with some columns
of one head's state [dk, dv].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.wide_dot import wide_dot
from hardpoint_torch_gpu.plan import TILE as QUERIES
from hardpoint_torch_gpu.plan import GpuPlan

#: Tokens of a block, and columns of the state per program with one token and with several: larger blocks spill.
_BLOCK, _COLUMNS, _COLUMNS_OF_BLOCKS = 32, 32, 16


@dataclass(frozen=True)
class DeltaRule:
    """The factor on q, and whether q and k are divided by their length."""

    scale: float
    unit: bool


@triton.jit
def _vector(ptr, mask, UNIT: tl.constexpr):
    x = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    if UNIT:
        x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) + 1e-6)
    return x


@triton.jit
def _vectors(ptr, mask, UNIT: tl.constexpr):
    """One in each row."""
    x = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    if UNIT:
        x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6))[:, None]
    return x


@triton.jit(do_not_specialize=["table_row"])
def _delta_decode(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, state_ptr, table_ptr, starts_ptr, lengths_ptr, out_ptr, scale,
    table_row, q_row, q_head, k_row, k_head, v_row, v_head, decay_row, beta_row, page, state_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    UNIT: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    v, head, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    begin, end, length = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1), tl.load(lengths_ptr + row)
    home = tl.load(table_ptr + row.to(tl.int64) * table_row).to(tl.int64)
    columns = v < V
    after_others(AHEAD)
    if end - begin != 1:
        if CLEAR:
            blank = tl.zeros([BLOCK], tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (row.to(tl.int64) * HEADS + head) * V + v, blank, mask=columns)
        return
    k, token, shared = tl.arange(0, K_PAD), begin.to(tl.int64), head // SHARED
    rows = k < K
    there = rows[:, None] & columns[None, :]
    place = state_ptr + home * page + head * state_head + k[:, None] * V + v[None, :]
    known = (k < tl.where(length > 1, K, 0))[:, None] & columns[None, :]
    state = tl.load(place, mask=known, other=0.0).to(tl.float32)
    query = _vector(q_ptr + token * q_row + shared * q_head + k, rows, UNIT) * scale
    key = _vector(k_ptr + token * k_row + shared * k_head + k, rows, UNIT)
    value = tl.load(v_ptr + token * v_row + head * v_head + v, mask=columns, other=0.0).to(tl.float32)
    state *= tl.exp(tl.load(decay_ptr + token * decay_row + head).to(tl.float32))
    beta = tl.load(beta_ptr + token * beta_row + head).to(tl.float32)
    new = beta * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * new[None, :]
    tl.store(place, state.to(state_ptr.dtype.element_ty), mask=there)
    out = tl.sum(state * query[:, None], 0)
    tl.store(out_ptr + (token * HEADS + head) * V + v, out.to(out_ptr.dtype.element_ty), mask=columns)


@triton.jit
def _delta_within(
    q_ptr, k_ptr, decay_ptr, beta_ptr, starts_ptr, tile_rows_ptr, tile_firsts_ptr, within_ptr, scale, q_row, q_head,
    k_row, k_head, decay_row, beta_row, HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr,
    K_PAD: tl.constexpr, UNIT: tl.constexpr, SUBS: tl.constexpr, TOKENS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Of one block and head, a row per token: the inverse of 1 + M, then products of q and k times decays."""
    head, tile = tl.program_id(0), tl.program_id(1) // SUBS
    row = tl.load(tile_rows_ptr + tile)
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    first = tl.load(tile_firsts_ptr + tile) + tl.program_id(1) % SUBS * TOKENS
    if first >= end - begin:
        return
    t, d = tl.arange(0, TOKENS), tl.arange(0, K_PAD)
    real = first + t < end - begin
    token = (begin + first + t).to(tl.int64)
    shared, wide = head // SHARED, real[:, None] & (d < K)[None, :]
    k = _vectors(k_ptr + token[:, None] * k_row + shared * k_head + d[None, :], wide, UNIT)
    running = tl.cumsum(tl.load(decay_ptr + token * decay_row + head, mask=real, other=0.0).to(tl.float32), 0)
    beta = tl.load(beta_ptr + token * beta_row + head, mask=real, other=0.0).to(tl.float32)
    # M turned over: [s, t], above the diagonal.
    between = tl.where(t[:, None] < t[None, :], running[None, :] - running[:, None], float("-inf"))
    square = tl.zeros([TOKENS, TOKENS], tl.float32)
    turned = wide_dot(k, tl.trans(k), square, HALVES) * tl.exp(between) * beta[None, :]
    inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    for at in range(1, TOKENS):
        factors = tl.sum(tl.where(t[None, :] == at, turned, 0.0), 1)  # of the rows before, which are done
        line = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(t[:, None] == at, inverse - line[None, :], inverse)
    target = within_ptr + (token[:, None] * HEADS + head) * (2 * TOKENS) + t[None, :]
    tl.store(target, inverse, mask=real[:, None])
    q = _vectors(q_ptr + token[:, None] * q_row + shared * q_head + d[None, :], wide, UNIT) * scale
    between = tl.where(t[:, None] >= t[None, :], running[:, None] - running[None, :], float("-inf"))
    tl.store(target + TOKENS, wide_dot(q, tl.trans(k), square, HALVES) * tl.exp(between), mask=real[:, None])


@triton.jit(do_not_specialize=["table_row"])
def _delta_blocks(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, state_ptr, table_ptr, starts_ptr, lengths_ptr, out_ptr, scale,
    table_row, q_row, q_head, k_row, k_head, v_row, v_head, decay_row, beta_row, page, state_head, within_ptr,
    HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    v, head, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    begin, end, length = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1), tl.load(lengths_ptr + row)
    count = end - begin
    if count < 2:
        return
    d, t, shared = tl.arange(0, K_PAD), tl.arange(0, TOKENS), head // SHARED
    rows, columns = d < K, v < V
    there = rows[:, None] & columns[None, :]
    home = tl.load(table_ptr + row.to(tl.int64) * table_row).to(tl.int64)
    place = state_ptr + home * page + head * state_head + d[:, None] * V + v[None, :]
    known = (d < tl.where(length > count, K, 0))[:, None] & columns[None, :]
    state = tl.load(place, mask=known, other=0.0).to(tl.float32)
    for first in range(0, count, TOKENS):
        real = first + t < count
        token = (begin + first + t).to(tl.int64)
        wide = real[:, None] & rows[None, :]
        q = _vectors(q_ptr + token[:, None] * q_row + shared * q_head + d[None, :], wide, UNIT) * scale
        k = _vectors(k_ptr + token[:, None] * k_row + shared * k_head + d[None, :], wide, UNIT)
        mask = real[:, None] & columns[None, :]
        value = tl.load(v_ptr + token[:, None] * v_row + head * v_head + v[None, :], mask=mask, other=0.0)
        decay = tl.load(decay_ptr + token * decay_row + head, mask=real, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * beta_row + head, mask=real, other=0.0).to(tl.float32)
        lines = within_ptr + (token[:, None] * HEADS + head) * (2 * TOKENS) + t[None, :]
        inverse = tl.load(lines, mask=real[:, None], other=0.0)
        reach = tl.load(lines + TOKENS, mask=real[:, None], other=0.0)
        running, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        start = tl.exp(running)[:, None]
        flat = tl.zeros([TOKENS, BLOCK], tl.float32)
        wanted = value.to(tl.float32) - start * wide_dot(k, state, flat, HALVES)
        new = wide_dot(inverse, wanted * beta[:, None], flat, HALVES)
        out = wide_dot(reach, new, wide_dot(q, state, flat, HALVES) * start, HALVES)
        target = out_ptr + (token[:, None] * HEADS + head) * V + v[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)
        late = k * tl.exp(whole - running)[:, None]
        state = wide_dot(tl.trans(late), new, state * tl.exp(whole), HALVES)
    tl.store(place, state.to(state_ptr.dtype.element_ty), mask=there)


def gated_delta(
    inputs: tuple[torch.Tensor, ...],
    rule: DeltaRule,
    cache: torch.Tensor,
    plan: GpuPlan,
    group: int,
    out: torch.Tensor,
) -> None:
    """inputs: q and k [T, hk, dk], v [T, h, dv], decay and beta [T, h]; into out [T, h, dv].

    cache [pages, page, h, dk * dv] gets the new states.
    """
    q, k, v, decay, beta = inputs
    tokens, heads, width = v.shape
    k_heads, size = k.shape[1:]
    table, rows, tiles = plan.tables[group], len(plan.lengths), len(plan.tile_rows)
    given = (
        *inputs, cache, table, plan.starts, plan.lengths, out, rule.scale, table.stride(0), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), decay.stride(0), beta.stride(0), cache.stride(0),
        cache.stride(2),
    )  # fmt: skip
    shape = {
        "HEADS": heads, "SHARED": heads // k_heads, "K": size, "K_PAD": max(16, triton.next_power_of_2(size)),
        "UNIT": rule.unit,
    }  # fmt: skip
    if len(plan.parts):
        _delta_decode[(triton.cdiv(width, _COLUMNS), heads, rows)](
            *given, **shape, V=width, CLEAR=not tiles and rows == tokens, BLOCK=_COLUMNS, num_warps=2, **ahead(v)
        )
    if tiles:
        exact = {"HALVES": v.dtype is torch.bfloat16, "TOKENS": _BLOCK}
        within = torch.empty((tokens, heads, 2, _BLOCK), dtype=torch.float32, device=v.device)
        subs = QUERIES // _BLOCK
        _delta_within[(heads, tiles * subs)](
            q, k, decay, beta, plan.starts, plan.tile_rows, plan.tile_firsts, within, rule.scale, q.stride(0),
            q.stride(1), k.stride(0), k.stride(1), decay.stride(0), beta.stride(0), **shape, SUBS=subs, **exact,
            num_warps=4,
        )  # fmt: skip
        _delta_blocks[(triton.cdiv(width, _COLUMNS_OF_BLOCKS), heads, rows)](
            *given, within, **shape, V=width, BLOCK=_COLUMNS_OF_BLOCKS, **exact, num_warps=4, num_stages=2
        )
