"""What attention needs of projected heads, in one launch: norms of heads, rotation, keys and values in their pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead

#: Heads of a program: of 7 shapes the fastest on an H200 with its 2 warps.
_ROWS = 16


@dataclass(frozen=True)
class HeadRule:
    """What is done to heads of queries and keys.

    Attributes:
        interleaved, tail: as of `rope`.
        norm: kind, or None for none; eps: as of `norm`.
    """

    interleaved: bool
    tail: bool
    norm: str | None
    eps: float


@triton.jit
def _weighed(y, weight_ptr, d, inside, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr):
    """Numbers `d` of normed heads times theirs of the weight."""
    if WEIGHT:
        w = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = y * (w + 1.0 if PLUS_ONE else w)
    return y


@triton.jit
def _turn(
    x_ptr, x_head, out_ptr, out_head, weight_ptr, head, there, cos, sin, eps,
    D: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, STEP: tl.constexpr,
    APART: tl.constexpr, STILL: tl.constexpr, STILL_PAD: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr,
    MEAN: tl.constexpr, PLUS_ONE: tl.constexpr, WEIGHT: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Heads `head` of a token normed and rotated, where they are `there`; IN_PLACE: out is where they came from."""
    pair, still = tl.arange(0, HALF_PAD), tl.arange(0, STILL_PAD)
    turns, keeps = pair < HALF, still < STILL
    low_at, still_at = START + pair * STEP, still + (2 * HALF if START == 0 else 0)
    here, rests = there[:, None] & turns[None, :], there[:, None] & keeps[None, :]
    given, target = x_ptr + (head * x_head)[:, None], out_ptr + (head * out_head)[:, None]
    low = tl.load(given + low_at[None, :], mask=here, other=0.0)
    high = tl.load(given + (low_at + APART)[None, :], mask=here, other=0.0)
    if STILL > 0:
        rest = tl.load(given + still_at[None, :], mask=rests, other=0.0)
    if NORM:
        x, y = low.to(tl.float32), high.to(tl.float32)
        if STILL > 0:
            z = rest.to(tl.float32)
        if CENTER:
            total = tl.sum(x, 1) + tl.sum(y, 1)
            if STILL > 0:
                total += tl.sum(z, 1)
                z = tl.where(keeps[None, :], z - (total / D)[:, None], 0.0)
            x = tl.where(turns[None, :], x - (total / D)[:, None], 0.0)
            y = tl.where(turns[None, :], y - (total / D)[:, None], 0.0)
        square = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if STILL > 0:
            square += tl.sum(z * z, 1)
        if MEAN:
            square = square / D
        factor = (1.0 / tl.sqrt(square + eps))[:, None]
        # Rounded before they are rotated, as norms of their own round them.
        low = _weighed(x * factor, weight_ptr, low_at, turns, WEIGHT, PLUS_ONE).to(low.dtype)
        high = _weighed(y * factor, weight_ptr, low_at + APART, turns, WEIGHT, PLUS_ONE).to(high.dtype)
        if STILL > 0:
            rest = _weighed(z * factor, weight_ptr, still_at, keeps, WEIGHT, PLUS_ONE).to(rest.dtype)
    x, y = low.to(tl.float32), high.to(tl.float32)
    low, high = (x * cos - y * sin).to(low.dtype), (y * cos + x * sin).to(high.dtype)
    tl.store(target + low_at[None, :], low.to(out_ptr.dtype.element_ty), mask=here)
    tl.store(target + (low_at + APART)[None, :], high.to(out_ptr.dtype.element_ty), mask=here)
    if STILL > 0:
        if NORM or not IN_PLACE:
            tl.store(target + still_at[None, :], rest.to(out_ptr.dtype.element_ty), mask=rests)


@triton.jit
def _prepare(
    q_ptr, k_ptr, v_ptr, positions_ptr, table_ptr, q_weight_ptr, k_weight_ptr, slots_ptr, keys_ptr, values_ptr, eps,
    q_row, q_head, k_row, k_head, v_row, v_head, page_k, slot_k, head_k, page_v, slot_v, head_v,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    START: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr,
    STILL: tl.constexpr, STILL_PAD: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr,
    MEAN: tl.constexpr, PLUS_ONE: tl.constexpr, Q_WEIGHT: tl.constexpr, K_WEIGHT: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one token: of queries where they lie, or of keys, with the values beside them, into their page."""
    token = tl.program_id(0).to(tl.int64)
    pair, dv = tl.arange(0, HALF_PAD), tl.arange(0, DV_PAD)
    position = tl.load(positions_ptr + token)
    cos = tl.load(table_ptr + position * (2 * HALF) + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(table_ptr + position * (2 * HALF) + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    place = tl.load(slots_ptr + token)
    page, slot = (place // PAGE).to(tl.int64), place % PAGE
    after_others(AHEAD)
    number, query_programs = tl.program_id(1), tl.cdiv(HEADS, ROWS)
    if number < query_programs:
        head = number * ROWS + tl.arange(0, ROWS)
        _turn(
            q_ptr + token * q_row, q_head, q_ptr + token * q_row, q_head, q_weight_ptr, head, head < HEADS, cos, sin,
            eps, D, START, HALF, HALF_PAD, STEP, APART, STILL, STILL_PAD, NORM, CENTER, MEAN, PLUS_ONE, Q_WEIGHT, True,
        )  # fmt: skip
    else:
        head = (number - query_programs) * ROWS + tl.arange(0, ROWS)
        there = head < KV_HEADS
        _turn(
            k_ptr + token * k_row, k_head, keys_ptr + page * page_k + slot * slot_k, head_k, k_weight_ptr, head, there,
            cos, sin, eps, D, START, HALF, HALF_PAD, STEP, APART, STILL, STILL_PAD, NORM, CENTER, MEAN, PLUS_ONE,
            K_WEIGHT, False,
        )  # fmt: skip
        inside = there[:, None] & (dv < DV)[None, :]
        v = tl.load(v_ptr + token * v_row + (head * v_head)[:, None] + dv[None, :], mask=inside, other=0.0)
        target = values_ptr + page * page_v + slot * slot_v + (head * head_v)[:, None] + dv[None, :]
        tl.store(target, v.to(values_ptr.dtype.element_ty), mask=inside)


def prepare_heads(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    rule: HeadRule,
    weights: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page: int,
) -> None:
    """Norm and rotate q [T, h, d] where it lies, and k [T, hk, d] on its way with v [T, hk, dv] into the pools.

    heads: q, k and v, whose last dimension is dense. positions: int64 [T]. weights: table [P, rotary_dim], then of the
    norms of q and k, float32 [d] each, or None. slots: int32 [T]. keys, values: [pages, page, hk, d or dv].
    """
    (q, k, v), (table, q_weight, k_weight) = heads, weights
    tokens, count, width = q.shape
    kv_count, v_width, rotated = k.shape[1], v.shape[-1], table.shape[1]
    if not tokens:
        return
    half, still = rotated // 2, width - rotated
    _prepare[(tokens, triton.cdiv(count, _ROWS) + triton.cdiv(kv_count, _ROWS))](
        q, k, v, positions, table, table if q_weight is None else q_weight, table if k_weight is None else k_weight,
        slots, keys, values, rule.eps, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        HEADS=count, KV_HEADS=kv_count, D=width, DV=v_width, DV_PAD=triton.next_power_of_2(v_width),
        START=still if rule.tail else 0, HALF=half, HALF_PAD=triton.next_power_of_2(half),
        STEP=2 if rule.interleaved else 1, APART=1 if rule.interleaved else half, STILL=still,
        STILL_PAD=triton.next_power_of_2(max(still, 1)), PAGE=page, NORM=rule.norm is not None,
        CENTER=rule.norm == "ln", MEAN=rule.norm != "l2", PLUS_ONE=rule.norm == "rms1p",
        Q_WEIGHT=q_weight is not None, K_WEIGHT=k_weight is not None, ROWS=_ROWS, num_warps=2, **ahead(q),
    )  # fmt: skip
