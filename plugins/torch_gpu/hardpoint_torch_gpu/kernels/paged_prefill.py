"""Paged attention of rows that bring several tokens: one program per tile of queries and head, online softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.softmax import LOG2E, fold, pages, scores, with_sink
from hardpoint_torch_gpu.limits import Limits, limits_of
from hardpoint_torch_gpu.plan import TILE, GpuPlan
from hardpoint_torch_gpu.rule import ScoreRule

#: Keys per step, warps, steps that are loaded ahead: of 9 shapes the fastest on an H200.
BLOCK, WARPS, STAGES = 64, 8, 2
#: Queries per program, keys per step, warps where those do not fit in shared memory, or where heads are wide.
_SMALLER = ((TILE, 32, WARPS), (64, 32, 4), (64, 16, 4), (32, 16, 4))
#: For float32, multiplied number by number: of the largest tile the compiler makes a megabyte of code in half a minute.
_FLOAT32: tuple[tuple[int, int, int], ...] = ((32, 16, 4),)


@dataclass(frozen=True)
class Shape:
    """How the kernel is cut: queries per program, a divisor of `TILE`; keys per step; warps; stages."""

    queries: int
    block: int
    warps: int
    stages: int


def shape_for(limits: Limits, width: int, v_width: int, dtype: torch.dtype) -> Shape:
    """The largest that fits; sizes of heads are powers of two."""
    cuts = _FLOAT32
    if dtype is not torch.float32:
        cuts = _SMALLER if max(width, v_width) > 128 else ((TILE, BLOCK, WARPS), *_SMALLER)
    return largest(limits, cuts, STAGES, width, v_width, dtype)


def largest(
    limits: Limits, cuts: Sequence[tuple[int, int, int]], stages: int, width: int, v_width: int, dtype: torch.dtype
) -> Shape:
    """The first of `cuts` (queries, keys per step, warps) that fits, else the last; `stages`: that are wanted."""
    steps = [block * (width + v_width) * dtype.itemsize for _, block, _ in cuts]
    shapes = [Shape(*cut, limits.stages(stages, step)) for cut, step in zip(cuts, steps, strict=True)]
    for shape, step in zip(shapes, steps, strict=True):
        # Queries pass through shared memory before the loop, weights of keys beside the loop's keys and values.
        queries, keys = shape.queries * dtype.itemsize, shape.block * max(width, v_width) * dtype.itemsize
        held = max(queries * width, queries * shape.block + limits.held(shape.stages, step))
        if held <= limits.shared_bytes and limits.eases(keys):
            return shape
    return shapes[-1]


@triton.jit
def walk(
    first_key, last_key, q, at, k_ptr, v_ptr, table_ptr, row, stop, slope, scale, softcap, table_row,
    page_k, slot_k, page_v, slot_v, best, total, mixed,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Keys [first_key, last_key), in blocks. EDGE: some of them are not seen by every query."""
    d, dv, n = tl.arange(0, D_PAD), tl.arange(0, DV_PAD), tl.arange(0, BLOCK)
    for first in range(first_key, last_key, BLOCK):
        position = first + n
        inside = position < stop
        if EDGE and WINDOW > 0:
            # Pages before the window may be anybody's by now.
            inside = inside & (position > tl.min(at, 0) - WINDOW)
        page, slot = pages(table_ptr, row, table_row, position, inside, PAGE, EDGE), position % PAGE
        k_at = k_ptr + (page * page_k + slot * slot_k)[None, :] + d[:, None]
        v_at = v_ptr + (page * page_v + slot * slot_v)[:, None] + dv[None, :]
        if EDGE or D < D_PAD:
            k = tl.load(k_at, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        else:
            k = tl.load(k_at)
        score = scores(tl.dot(q, k.to(q.dtype), input_precision=PRECISION), scale, softcap, SOFTCAP)
        distance = at[:, None] - position[None, :]
        if ALIBI:
            score -= slope * LOG2E * distance.to(tl.float32)
        if EDGE:
            seen = (distance >= 0) & inside[None, :]
            if WINDOW > 0:
                seen = seen & (distance < WINDOW)
            score = tl.where(seen, score, float("-inf"))
        if EDGE or DV < DV_PAD:
            v = tl.load(v_at, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        best, total, mixed = fold(score, v.to(q.dtype), best, total, mixed, PRECISION, EDGE)
    return best, total, mixed


@triton.jit(do_not_specialize=["table_row"])
def _prefill(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, starts_ptr, tile_rows_ptr, tile_firsts_ptr, slopes_ptr, sinks_ptr,
    out_ptr, scale, softcap, q_row, q_head, table_row, page_k, slot_k, head_k, page_v, slot_v, head_v,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0) // PARTS, tl.program_id(1)
    row, offset = tl.load(tile_rows_ptr + tile), tl.load(tile_firsts_ptr + tile)
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if PARTS > 1:
        offset += (tl.program_id(0) % PARTS) * TILE
        if offset >= end - begin:
            return
    length = tl.load(lengths_ptr + row)
    earliest = length - (end - begin) + offset
    kv_head = head // SHARED

    m, d, dv = tl.arange(0, TILE), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    token = (begin + offset + m).to(tl.int64)
    real = offset + m < end - begin
    at = earliest + m
    q = tl.load(
        q_ptr + token[:, None] * q_row + head * q_head + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DV_PAD], tl.float32)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head)
    k_ptr += kv_head * head_k
    v_ptr += kv_head * head_v

    # Blocks that every query sees whole lie in [plain, diagonal); those before are at the window's edge.
    stop = tl.minimum(earliest + TILE, length)
    diagonal = (earliest + 1) // BLOCK * BLOCK
    plain = 0
    if WINDOW > 0:
        start = tl.maximum(earliest - WINDOW + 1, 0) // BLOCK * BLOCK
        plain = tl.minimum(tl.cdiv(tl.maximum(earliest + TILE - WINDOW, 0), BLOCK) * BLOCK, diagonal)
        plain = tl.maximum(plain, start)
        best, total, mixed = walk(
            start, plain, q, at, k_ptr, v_ptr, table_ptr, row, stop, slope, scale, softcap, table_row, page_k, slot_k,
            page_v, slot_v, best, total, mixed, D, D_PAD, DV, DV_PAD, PAGE, WINDOW, SOFTCAP, ALIBI, BLOCK, PRECISION,
            True,
        )  # fmt: skip
    best, total, mixed = walk(
        plain, diagonal, q, at, k_ptr, v_ptr, table_ptr, row, stop, slope, scale, softcap, table_row, page_k, slot_k,
        page_v, slot_v, best, total, mixed, D, D_PAD, DV, DV_PAD, PAGE, WINDOW, SOFTCAP, ALIBI, BLOCK, PRECISION, False,
    )  # fmt: skip
    best, total, mixed = walk(
        tl.maximum(plain, diagonal), stop, q, at, k_ptr, v_ptr, table_ptr, row, stop, slope, scale, softcap, table_row,
        page_k, slot_k, page_v, slot_v, best, total, mixed, D, D_PAD, DV, DV_PAD, PAGE, WINDOW, SOFTCAP, ALIBI, BLOCK,
        PRECISION, True,
    )  # fmt: skip
    if SINKS:
        total, mixed = with_sink(tl.load(sinks_ptr + head).to(tl.float32), best, total, mixed)
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
    d_pad, dv_pad = max(16, triton.next_power_of_2(width)), max(16, triton.next_power_of_2(v_width))
    shape = shape_for(limits_of(q.device), d_pad, dv_pad, q.dtype)
    parts = TILE // shape.queries
    table = plan.tables[group]
    _prefill[(tiles * parts, heads)](
        q, keys, values, table, plan.lengths, plan.starts, plan.tile_rows, plan.tile_firsts, rule.slopes(q.device),
        q if sinks is None else sinks, out, rule.scale, rule.softcap or 0.0, q.stride(0), q.stride(1), table.stride(0),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        HEADS=heads, SHARED=heads // kv_heads, D=width, D_PAD=d_pad, DV=v_width, DV_PAD=dv_pad, PAGE=plan.page_tokens,
        WINDOW=rule.window or 0, SOFTCAP=rule.softcap is not None, ALIBI=rule.alibi is not None,
        SINKS=sinks is not None, PARTS=parts, TILE=shape.queries, BLOCK=shape.block, PRECISION="ieee",
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
