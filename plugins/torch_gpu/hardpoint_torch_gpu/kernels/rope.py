"""Rotary embedding in place, of queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead


@triton.jit
def _rope(
    q_ptr, k_ptr, positions_ptr, table_ptr, q_row, q_head, k_row, k_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
    APART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = pair < HALF
    position = tl.load(positions_ptr + token)
    cos = tl.load(table_ptr + position * (2 * HALF) + pair, mask=inside, other=0.0)[None, :]
    sin = tl.load(table_ptr + position * (2 * HALF) + HALF + pair, mask=inside, other=0.0)[None, :]
    after_others(AHEAD)
    queries = q_ptr + token * q_row + head * q_head
    keys = k_ptr + token * k_row + (head - HEADS) * k_head
    first = tl.where(head < HEADS, queries, keys)[:, None] + START + pair[None, :] * STEP
    here = (head < HEADS + KV_HEADS)[:, None] & inside[None, :]
    low = tl.load(first, mask=here, other=0.0)
    high = tl.load(first + APART, mask=here, other=0.0)
    x, y = low.to(tl.float32), high.to(tl.float32)
    tl.store(first, (x * cos - y * sin).to(low.dtype), mask=here)
    tl.store(first + APART, (y * cos + x * sin).to(low.dtype), mask=here)


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool, tail: bool
) -> None:
    """Rotate q [T, h, d] and k [T, hk, d], whose last dimension is dense, by rows of table [P, rotary_dim]."""
    tokens, heads, width = q.shape
    rotated = table.shape[1]
    if not tokens:
        return
    half = rotated // 2
    rows = 8
    _rope[(tokens, triton.cdiv(heads + k.shape[1], rows))](
        q, k, positions, table, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        HEADS=heads, KV_HEADS=k.shape[1], START=width - rotated if tail else 0, HALF=half,
        STEP=2 if interleaved else 1, APART=1 if interleaved else half,
        ROWS=rows, BLOCK=triton.next_power_of_2(half), num_warps=2, **ahead(q),
    )  # fmt: skip
