"""Paged attention of rows that bring several tokens: one program per tile of queries and head, online softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.paged_decode import capped
from hardpoint_torch_gpu.plan import TILE, GpuPlan
from hardpoint_torch_gpu.rule import ScoreRule


@triton.jit
def _prefill(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, starts_ptr, tile_rows_ptr, tile_firsts_ptr, slopes_ptr, sinks_ptr,
    out_ptr, scale, softcap, q_row, q_head, table_row, page_k, slot_k, head_k, page_v, slot_v, head_v,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row, offset = tl.load(tile_rows_ptr + tile), tl.load(tile_firsts_ptr + tile)
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    length = tl.load(lengths_ptr + row)
    cached = length - (end - begin)
    kv_head = head // SHARED

    m, d, dv, n = tl.arange(0, TILE), tl.arange(0, D_PAD), tl.arange(0, DV_PAD), tl.arange(0, BLOCK)
    token = (begin + offset + m).to(tl.int64)
    real = offset + m < end - begin
    at = cached + offset + m
    q = tl.load(
        q_ptr + token[:, None] * q_row + head * q_head + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DV_PAD], tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head)
    stop = tl.minimum(cached + offset + TILE, length)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(cached + offset - WINDOW + 1, 0) // BLOCK * BLOCK
    for first in range(start, stop, BLOCK):
        position = first + n
        inside = position < stop
        if WINDOW > 0:
            # Pages before the window may be anybody's by now.
            inside = inside & (position > cached + offset - WINDOW)
        page = tl.load(table_ptr + row.to(tl.int64) * table_row + position // PAGE, mask=inside, other=0).to(tl.int64)
        slot = position % PAGE
        k = tl.load(
            k_ptr + (page * page_k + slot * slot_k + kv_head * head_k)[None, :] + d[:, None],
            mask=inside[None, :] & (d < D)[:, None], other=0.0,
        )  # fmt: skip
        score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
        if SOFTCAP:
            score = capped(score, softcap)
        distance = at[:, None] - position[None, :]
        if ALIBI:
            score -= slope * distance.to(tl.float32)
        seen = (distance >= 0) & inside[None, :]
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        score = tl.where(seen, score, float("-inf"))
        larger = tl.maximum(best, tl.max(score, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # a row that has seen nothing yet
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(best - base)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(
            v_ptr + (page * page_v + slot * slot_v + kv_head * head_v)[:, None] + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :], other=0.0,
        )  # fmt: skip
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        best = larger
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        larger = tl.maximum(best, sink)
        total = total * tl.exp(best - larger) + tl.exp(sink - larger)
        mixed = mixed * tl.exp(best - larger)[:, None]
    y = tl.where(total[:, None] > 0, mixed / total[:, None], 0.0)
    place = (token[:, None] * HEADS + head) * DV + dv[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: GpuPlan,
    group: int,
    rule: ScoreRule,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The tiles of `plan` of q [T, h, d] against cached keys and values [pages, page, hk, d]; into out [T, h, dv]."""
    tiles = len(plan.tile_rows)
    if not tiles:
        return
    _, heads, width = q.shape
    kv_heads, v_width = keys.shape[2], values.shape[-1]
    wide = q.dtype == torch.float32
    table = plan.tables[group]
    _prefill[(tiles, heads)](
        q, keys, values, table, plan.lengths, plan.starts, plan.tile_rows, plan.tile_firsts, rule.slopes(q.device),
        q if sinks is None else sinks, out, rule.scale, rule.softcap or 0.0, q.stride(0), q.stride(1), table.stride(0),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        HEADS=heads, SHARED=heads // kv_heads, D=width, D_PAD=max(16, triton.next_power_of_2(width)), DV=v_width,
        DV_PAD=max(16, triton.next_power_of_2(v_width)), PAGE=plan.page_tokens, WINDOW=rule.window or 0,
        SOFTCAP=rule.softcap is not None, ALIBI=rule.alibi is not None, SINKS=sinks is not None, TILE=TILE,
        BLOCK=32, PRECISION="ieee" if wide else "tf32", num_warps=8, num_stages=2,
    )  # fmt: skip
