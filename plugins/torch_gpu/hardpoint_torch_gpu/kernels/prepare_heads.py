"""What attention needs of projected heads, in one launch: norms of heads, rotation, keys and values in their pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead

#: Heads of a program.
_ROWS = 8


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
def _weighed(y, key, q_weight_ptr, k_weight_ptr, d, inside, Q_WEIGHT: tl.constexpr, K_WEIGHT: tl.constexpr,
             PLUS_ONE: tl.constexpr):  # fmt: skip
    """Numbers `d` of normed heads times the weights of queries or keys."""
    if Q_WEIGHT:
        w = tl.load(q_weight_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = tl.where(key, y, y * (w + 1.0 if PLUS_ONE else w))
    if K_WEIGHT:
        w = tl.load(k_weight_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = tl.where(key, y * (w + 1.0 if PLUS_ONE else w), y)
    return y


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
    """Heads of one token: queries where they lie, then keys, each with the values of its head, into their pages."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF_PAD)
    still, dv = tl.arange(0, STILL_PAD), tl.arange(0, DV_PAD)
    query, kv = head < HEADS, head - HEADS
    key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    turns, keeps = pair < HALF, still < STILL
    position = tl.load(positions_ptr + token)
    cos = tl.load(table_ptr + position * (2 * HALF) + pair, mask=turns, other=0.0)[None, :]
    sin = tl.load(table_ptr + position * (2 * HALF) + HALF + pair, mask=turns, other=0.0)[None, :]
    place = tl.load(slots_ptr + token)
    page, slot = (place // PAGE).to(tl.int64), place % PAGE
    after_others(AHEAD)

    d_low, d_still = START + pair * STEP, still + (2 * HALF if START == 0 else 0)
    here = (query | key)[:, None]
    given = tl.where(query, q_ptr + token * q_row + head * q_head, k_ptr + token * k_row + kv * k_head)[:, None]
    low = tl.load(given + d_low[None, :], mask=here & turns[None, :], other=0.0)
    high = tl.load(given + APART + d_low[None, :], mask=here & turns[None, :], other=0.0)
    if STILL > 0:
        rest = tl.load(given + d_still[None, :], mask=here & keeps[None, :], other=0.0)
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
        keyed = key[:, None]
        x = _weighed(x * factor, keyed, q_weight_ptr, k_weight_ptr, d_low, turns, Q_WEIGHT, K_WEIGHT, PLUS_ONE)
        y = _weighed(y * factor, keyed, q_weight_ptr, k_weight_ptr, d_low + APART, turns, Q_WEIGHT, K_WEIGHT, PLUS_ONE)
        # Rounded before they are rotated, as norms of their own round them.
        low, high = x.to(low.dtype), y.to(high.dtype)
        if STILL > 0:
            z = _weighed(z * factor, keyed, q_weight_ptr, k_weight_ptr, d_still, keeps, Q_WEIGHT, K_WEIGHT, PLUS_ONE)
            rest = z.to(rest.dtype)
    x, y = low.to(tl.float32), high.to(tl.float32)
    low, high = (x * cos - y * sin).to(low.dtype), (y * cos + x * sin).to(high.dtype)

    cached = (keys_ptr + page * page_k + slot * slot_k + kv * head_k)[:, None]
    turned, stored = query[:, None] & turns[None, :], key[:, None] & turns[None, :]
    tl.store(given + d_low[None, :], low, mask=turned)
    tl.store(given + APART + d_low[None, :], high, mask=turned)
    tl.store(cached + d_low[None, :], low.to(keys_ptr.dtype.element_ty), mask=stored)
    tl.store(cached + APART + d_low[None, :], high.to(keys_ptr.dtype.element_ty), mask=stored)
    if STILL > 0:
        if NORM:
            tl.store(given + d_still[None, :], rest, mask=query[:, None] & keeps[None, :])
        tl.store(
            cached + d_still[None, :], rest.to(keys_ptr.dtype.element_ty), mask=key[:, None] & keeps[None, :]
        )  # fmt: skip
    valued = key[:, None] & (dv < DV)[None, :]
    v = tl.load(v_ptr + token * v_row + (kv * v_head)[:, None] + dv[None, :], mask=valued, other=0.0)
    target = (values_ptr + page * page_v + slot * slot_v + kv * head_v)[:, None] + dv[None, :]
    tl.store(target, v.to(values_ptr.dtype.element_ty), mask=valued)


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
    _prepare[(tokens, triton.cdiv(count + kv_count, _ROWS))](
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
