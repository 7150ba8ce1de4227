"""Latent attention of prompts with nothing cached before them: over keys and values of each head, as they came.

What a step expands of its own tokens costs no more than absorbing their queries, and every product of a query and a key
is then of dn + dr + dv numbers instead of 2 c + dr, a third. The rope key stays one for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.softmax import LOG2E, fold
from hardpoint_torch_gpu.limits import Limits, limits_of
from hardpoint_torch_gpu.plan import TILE as QUERIES

#: Queries of a program, keys per step, warps, steps loaded ahead: the first that fits; the last is for float32.
_SHAPES = ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1))
#: Bytes of shared memory beside queries, keys and values.
_OTHERS = 4 << 10


@dataclass(frozen=True)
class Fresh:
    """Prompts with nothing cached before them. int32, as in `GpuPlan`: the row and first query of each of their tiles,
    and of all rows the first token."""

    rows: torch.Tensor
    firsts: torch.Tensor
    starts: torch.Tensor


def expanded_shape(limits: Limits, key: int, value: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """For keys and values of these numbers, powers of two each part."""
    if dtype is torch.float32:
        return _SHAPES[-1]
    for shape in _SHAPES:
        tile, block, _, stages = shape
        if (tile * key + stages * block * (key + value)) * dtype.itemsize + _OTHERS <= limits.shared_bytes:
            return shape
    return _SHAPES[-1]


@triton.jit
def _walk(
    first, last, count, q, turned, query, k_ptr, r_ptr, v_ptr, scale, k_token, r_token, v_token, best, total, mixed,
    N: tl.constexpr, N_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Keys [first, last), in blocks. EDGE: not every query sees all of them."""
    n, r, v = tl.arange(0, N_PAD), tl.arange(0, R_PAD), tl.arange(0, V_PAD)
    for begin in range(first, last, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token, inside = at.to(tl.int64), at < count
        key_at = k_ptr + (token * k_token)[None, :] + n[:, None]
        rope_at = r_ptr + (token * r_token)[None, :] + r[:, None]
        value_at = v_ptr + (token * v_token)[:, None] + v[None, :]
        if EDGE or N < N_PAD or R < R_PAD or V < V_PAD:
            key = tl.load(key_at, mask=inside[None, :] & (n < N)[:, None], other=0.0)
            rope = tl.load(rope_at, mask=inside[None, :] & (r < R)[:, None], other=0.0)
            value = tl.load(value_at, mask=inside[:, None] & (v < V)[None, :], other=0.0)
        else:
            key, rope, value = tl.load(key_at), tl.load(rope_at), tl.load(value_at)
        product = tl.dot(turned, rope, tl.dot(q, key, input_precision="ieee"), input_precision="ieee")
        score = product * (scale * LOG2E)
        if EDGE:
            score = tl.where((at[None, :] <= query[:, None]) & inside[None, :], score, float("-inf"))
        best, total, mixed = fold(score, value, best, total, mixed, "ieee", EDGE)
    return best, total, mixed


@triton.jit
def _mla_expanded(
    q_ptr, rope_ptr, k_ptr, r_ptr, v_ptr, starts_ptr, tile_rows_ptr, tile_firsts_ptr, out_ptr, scale, q_token, q_head,
    rope_token, rope_head, k_token, k_head, r_token, v_token, v_head, out_token, out_head, N: tl.constexpr,
    N_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    SUBS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1) // SUBS
    row = tl.load(tile_rows_ptr + tile)
    begin, end = tl.load(starts_ptr + row).to(tl.int64), tl.load(starts_ptr + row + 1)
    first, count = tl.load(tile_firsts_ptr + tile) + tl.program_id(1) % SUBS * TILE, (end - begin).to(tl.int32)
    if first >= count:
        return
    m, n, r, v = tl.arange(0, TILE), tl.arange(0, N_PAD), tl.arange(0, R_PAD), tl.arange(0, V_PAD)
    query, token = first + m, begin + first + m
    real = query < count
    q = tl.load(
        q_ptr + token[:, None] * q_token + head * q_head + n[None, :], mask=real[:, None] & (n < N)[None, :], other=0.0
    )
    turned = tl.load(
        rope_ptr + token[:, None] * rope_token + head * rope_head + r[None, :],
        mask=real[:, None] & (r < R)[None, :], other=0.0,
    )  # fmt: skip
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, V_PAD], tl.float32)
    k_ptr += begin * k_token + head * k_head
    r_ptr += begin * r_token
    v_ptr += begin * v_token + head * v_head
    # Blocks before the diagonal are seen whole by every query of the tile.
    stop, diagonal = tl.minimum(first + TILE, count), (first + 1) // BLOCK * BLOCK
    best, total, mixed = _walk(
        0, diagonal, count, q, turned, query, k_ptr, r_ptr, v_ptr, scale, k_token, r_token, v_token, best, total, mixed,
        N, N_PAD, R, R_PAD, V, V_PAD, BLOCK, False,
    )  # fmt: skip
    best, total, mixed = _walk(
        diagonal, stop, count, q, turned, query, k_ptr, r_ptr, v_ptr, scale, k_token, r_token, v_token, best, total,
        mixed, N, N_PAD, R, R_PAD, V, V_PAD, BLOCK, True,
    )  # fmt: skip
    y = mixed / tl.where(total > 0, total, 1.0)[:, None]
    target = out_ptr + token[:, None] * out_token + head * out_head + v[None, :]
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (v < V)[None, :])


def mla_expanded(
    q: torch.Tensor,
    rope: torch.Tensor,
    k: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    fresh: Fresh,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Rows of `fresh`: q and k [T, h, dn], rope [T, h, dr], k_rope [T, dr], v [T, h, dv]; into their rows of out."""
    _, heads, size = q.shape
    turned, width = rope.shape[-1], v.shape[-1]
    pads = [max(16, triton.next_power_of_2(number)) for number in (size, turned, width)]
    tile, block, warps, stages = expanded_shape(limits_of(q.device), pads[0] + pads[1], pads[2], q.dtype)
    subs = QUERIES // tile
    _mla_expanded[(heads, len(fresh.rows) * subs)](
        q, rope, k, k_rope, v, fresh.starts, fresh.rows, fresh.firsts, out, scale, q.stride(0), q.stride(1),
        rope.stride(0), rope.stride(1), k.stride(0), k.stride(1), k_rope.stride(0), v.stride(0), v.stride(1),
        out.stride(0), out.stride(1), N=size, N_PAD=pads[0], R=turned, R_PAD=pads[1], V=width, V_PAD=pads[2], SUBS=subs,
        TILE=tile, BLOCK=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
