"""Latent attention of rows that bring several tokens: tiles of (query, head), as all heads share what is cached."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.latents import latent_shape, walk
from hardpoint_torch_gpu.limits import limits_of
from hardpoint_torch_gpu.plan import TILE as QUERIES
from hardpoint_torch_gpu.plan import GpuPlan


@triton.jit(do_not_specialize=["table_row"])
def _mla_prefill(
    q_ptr, rope_ptr, c_ptr, r_ptr, table_ptr, lengths_ptr, starts_ptr, tile_rows_ptr, tile_firsts_ptr, out_ptr, scale,
    q_token, q_head, rope_token, rope_head, table_row, page_c, slot_c, page_r, slot_r, out_token, out_head,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sub, tile = tl.program_id(0), tl.program_id(1)
    row, offset = tl.load(tile_rows_ptr + tile), tl.load(tile_firsts_ptr + tile)
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    length = tl.load(lengths_ptr + row)
    queries = tl.minimum(end - begin - offset, QUERIES)
    if sub * TILE >= queries * HEADS:
        return
    earliest = length - (end - begin) + offset
    m, c, r = sub * TILE + tl.arange(0, TILE), tl.arange(0, C_PAD), tl.arange(0, R_PAD)
    query, head = m // HEADS, m % HEADS
    real = query < queries
    at, token = earliest + query, (begin + offset + query).to(tl.int64)
    q = tl.load(
        q_ptr + (token * q_token + head * q_head)[:, None] + c[None, :], mask=real[:, None] & (c < C)[None, :],
        other=0.0,
    )  # fmt: skip
    turned = tl.load(
        rope_ptr + (token * rope_token + head * rope_head)[:, None] + r[None, :],
        mask=real[:, None] & (r < R)[None, :], other=0.0,
    )  # fmt: skip
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, C_PAD], tl.float32)
    # Blocks before the diagonal are seen whole by every query of the tile.
    stop = earliest + tl.minimum((sub * TILE + TILE - 1) // HEADS, queries - 1) + 1
    diagonal = (earliest + sub * TILE // HEADS + 1) // BLOCK * BLOCK
    best, total, mixed = walk(
        0, diagonal, stop, q, turned, at, c_ptr, r_ptr, table_ptr, row, scale, table_row, page_c, slot_c, page_r,
        slot_r, best, total, mixed, C, C_PAD, R, R_PAD, PAGE, BLOCK, False,
    )  # fmt: skip
    best, total, mixed = walk(
        diagonal, stop, stop, q, turned, at, c_ptr, r_ptr, table_ptr, row, scale, table_row, page_c, slot_c, page_r,
        slot_r, best, total, mixed, C, C_PAD, R, R_PAD, PAGE, BLOCK, True,
    )  # fmt: skip
    y = mixed / tl.where(total > 0, total, 1.0)[:, None]
    target = out_ptr + (token * out_token + head * out_head)[:, None] + c[None, :]
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (c < C)[None, :])


def mla_prefill(
    q: torch.Tensor,
    rope: torch.Tensor,
    latents: torch.Tensor,
    keys: torch.Tensor,
    plan: GpuPlan,
    group: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """The tiles of `plan`: absorbed queries q [h, T, c] and rotated ones [T, h, dr]; into out [h, T, c].

    latents, keys: pools [pages, page, 1, c] and [pages, page, 1, dr] that hold the step's tokens already.
    """
    tiles = len(plan.tile_rows)
    if not tiles:
        return
    heads, _, width = q.shape
    turned = rope.shape[-1]
    c_pad, r_pad = (max(16, triton.next_power_of_2(size)) for size in (width, turned))
    shape = latent_shape(limits_of(q.device), QUERIES, c_pad + r_pad, q.dtype)
    table = plan.tables[group]
    _mla_prefill[(triton.cdiv(QUERIES * heads, shape.tile), tiles)](
        q, rope, latents, keys, table, plan.lengths, plan.starts, plan.tile_rows, plan.tile_firsts, out, scale,
        q.stride(1), q.stride(0), rope.stride(0), rope.stride(1), table.stride(0), latents.stride(0),
        latents.stride(1), keys.stride(0), keys.stride(1), out.stride(1), out.stride(0), HEADS=heads, QUERIES=QUERIES,
        TILE=shape.tile, C=width, C_PAD=c_pad, R=turned, R_PAD=r_pad, PAGE=plan.page_tokens, BLOCK=shape.block,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
