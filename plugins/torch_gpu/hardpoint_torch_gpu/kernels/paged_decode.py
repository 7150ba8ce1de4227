"""Paged attention of rows that bring one token: their keys are split over programs, and the last one to finish joins.

One program attends all query heads that share a head of keys, so that each key is read once. The program that owns a
row's last place also stores the new key and value there, instead of reading them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.plan import GpuPlan
from hardpoint_torch_gpu.rule import ScoreRule

#: Programs that keep every multiprocessor of a large GPU busy.
_PROGRAMS = 528
_MOST_SPLITS = 64
#: Keys per step of the loop and steps that are loaded ahead; of 12 shapes the fastest on an H200, with one warp.
BLOCK, STAGES = 32, 2


@triton.jit
def capped(score, softcap):
    """softcap * tanh(score / softcap)."""
    e = tl.exp(-2.0 * tl.abs(score / softcap))
    return tl.where(score < 0, -1.0, 1.0) * softcap * (1.0 - e) / (1.0 + e)


@triton.jit
def _decode(
    q_ptr, new_k_ptr, new_v_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, rows_ptr, tokens_ptr, slopes_ptr, sinks_ptr,
    out_ptr, parts_ptr, best_ptr, total_ptr, arrived_ptr, scale, softcap, q_row, q_head, new_k_row, new_k_head,
    new_v_row, new_v_head, table_row, page_k, slot_k, head_k, page_v, slot_v, head_v,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SHARED_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, STORE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    entry, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token = tl.load(rows_ptr + entry), tl.load(tokens_ptr + entry).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    used = tl.maximum(tl.cdiv(length - first, tl.maximum(share, 1)), 1)
    if split >= used:
        return
    start = first + split * share
    stop = tl.minimum(start + share, length)
    ends = stop == length
    if STORE:
        stop = tl.minimum(stop, length - 1)  # the last place is not read: what belongs there is at hand

    g, d, dv, n = tl.arange(0, SHARED_PAD), tl.arange(0, D_PAD), tl.arange(0, DV_PAD), tl.arange(0, BLOCK)
    head = kv_head * SHARED + g
    real = g < SHARED
    q = tl.load(
        q_ptr + token * q_row + head[:, None] * q_head + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    best = tl.full([SHARED_PAD], float("-inf"), tl.float32)
    total = tl.zeros([SHARED_PAD], tl.float32)
    mixed = tl.zeros([SHARED_PAD, DV_PAD], tl.float32)
    if STORE:
        holds = ends & (length > 0)
        last = tl.maximum(length - 1, 0)
        home = tl.load(table_ptr + row.to(tl.int64) * table_row + last // PAGE).to(tl.int64)
        new_k = tl.load(new_k_ptr + token * new_k_row + kv_head * new_k_head + d, mask=d < D, other=0.0)
        new_v = tl.load(new_v_ptr + token * new_v_row + kv_head * new_v_head + dv, mask=dv < DV, other=0.0)
        new_k, new_v = new_k.to(k_ptr.dtype.element_ty), new_v.to(v_ptr.dtype.element_ty)
        slot = last % PAGE
        tl.store(k_ptr + home * page_k + slot * slot_k + kv_head * head_k + d, new_k, mask=d < tl.where(holds, D, 0))
        tl.store(v_ptr + home * page_v + slot * slot_v + kv_head * head_v + dv, new_v, mask=dv < tl.where(holds, DV, 0))
        score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        if SOFTCAP:
            score = capped(score, softcap)
        best = tl.where(holds, score, best)
        total = tl.where(holds, total + 1.0, total)
        mixed = tl.where(holds, mixed + new_v.to(tl.float32)[None, :], mixed)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=real, other=0.0)
    for at in range(start, stop, BLOCK):
        position = at + n
        inside = position < stop
        page = tl.load(table_ptr + row.to(tl.int64) * table_row + position // PAGE, mask=inside, other=0).to(tl.int64)
        within = position % PAGE
        k = tl.load(
            k_ptr + (page * page_k + within * slot_k + kv_head * head_k)[None, :] + d[:, None],
            mask=inside[None, :] & (d < D)[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = capped(scores, softcap)
        if ALIBI:
            scores += slope[:, None] * (position - (length - 1))[None, :].to(tl.float32)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp(scores - larger[:, None])
        shrink = tl.exp(best - larger)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(
            v_ptr + (page * page_v + within * slot_v + kv_head * head_v)[:, None] + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :], other=0.0,
        )  # fmt: skip
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        best = larger
    if used > 1:
        place = (entry * HEADS + head) * SPLITS + split
        tl.store(parts_ptr + place[:, None] * DV + dv[None, :], mixed, mask=real[:, None] & (dv < DV)[None, :])
        tl.store(best_ptr + place, best, mask=real)
        tl.store(total_ptr + place, total, mask=real)
        tl.debug_barrier()  # the whole program has stored before it says so
        counter = arrived_ptr + entry * tl.num_programs(1) + kv_head
        if tl.atomic_add(counter, 1) < used - 1:
            return
        tl.store(counter, 0)
        s = tl.arange(0, SPLITS)
        for one in range(SHARED):
            each = (entry * HEADS + kv_head * SHARED + one) * SPLITS + s
            bests = tl.load(best_ptr + each, mask=s < used, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(total_ptr + each, mask=s < used, other=0.0, cache_modifier=".cg")
            parts = tl.load(
                parts_ptr + each[:, None] * DV + dv[None, :], mask=(s < used)[:, None] & (dv < DV)[None, :], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            highest = tl.max(bests, 0)
            if SINKS:
                sink = tl.load(sinks_ptr + kv_head * SHARED + one).to(tl.float32)
                highest = tl.maximum(highest, sink)
            factor = tl.exp(bests - highest)
            sum_all = tl.sum(totals * factor, 0)
            if SINKS:
                sum_all += tl.exp(sink - highest)
            joined = tl.sum(parts * factor[:, None], 0) / sum_all
            target = out_ptr + (token * HEADS + kv_head * SHARED + one) * DV + dv
            tl.store(target, joined.to(out_ptr.dtype.element_ty), mask=dv < DV)
    else:
        if SINKS:
            sinks = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32)
            most = tl.maximum(best, sinks)
            total = total * tl.exp(best - most) + tl.exp(sinks - most)
            mixed = mixed * tl.exp(best - most)[:, None]
        y = tl.where(total[:, None] > 0, mixed / total[:, None], 0.0)
        spot = (token * HEADS + head[:, None]) * DV + dv[None, :]
        tl.store(out_ptr + spot, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])


def splits_for(entries: int, kv_heads: int) -> int:
    """Programs per row and head of keys: a power of two, one where rows alone fill the GPU."""
    wanted = _PROGRAMS // max(1, entries * kv_heads)
    return min(_MOST_SPLITS, 1 << (wanted.bit_length() - 1)) if wanted > 1 else 1


class PagedDecode:
    """Launches the kernel. Owns the counters by which the programs of a row know the last of them."""

    def __init__(self) -> None:
        self._arrived: dict[torch.device, torch.Tensor] = {}

    def __call__(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: GpuPlan,
        group: int,
        rule: ScoreRule,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Rows `plan.decode_rows` of q [T, h, d] against keys and values [pages, page, hk, d]; into out [T, h, dv].

        `new`: keys and values of the step's tokens, [T, hk, d], to be stored; None where they are stored already.
        """
        entries = len(plan.decode_rows)
        if not entries:
            return
        _, heads, width = q.shape
        kv_heads, v_width = keys.shape[2], values.shape[-1]
        shared, splits = heads // kv_heads, splits_for(entries, kv_heads)
        table = plan.tables[group]
        parts = best = total = out
        if splits > 1:
            parts = torch.empty((entries, heads, splits, v_width), dtype=torch.float32, device=q.device)
            best, total = torch.empty((2, entries, heads, splits), dtype=torch.float32, device=q.device)
        wide = q.dtype == torch.float32
        k, v = new or (q, q)
        _decode[(entries, kv_heads, splits)](
            q, k, v, keys, values, table, plan.lengths, plan.decode_rows, plan.decode_tokens, rule.slopes(q.device),
            q if sinks is None else sinks, out, parts, best, total, self._counters(q.device), rule.scale,
            rule.softcap or 0.0, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            table.stride(0), keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1),
            values.stride(2), HEADS=heads, SHARED=shared, SHARED_PAD=max(16, triton.next_power_of_2(shared)), D=width,
            D_PAD=max(16, triton.next_power_of_2(width)), DV=v_width, DV_PAD=max(16, triton.next_power_of_2(v_width)),
            PAGE=plan.page_tokens, WINDOW=rule.window or 0, SOFTCAP=rule.softcap is not None,
            ALIBI=rule.alibi is not None, SINKS=sinks is not None, STORE=new is not None, SPLITS=splits,
            BLOCK=BLOCK, PRECISION="ieee" if wide else "tf32", num_warps=1 if splits == 1 and width <= 128 else 2,
            num_stages=STAGES,
        )  # fmt: skip

    def _counters(self, device: torch.device) -> torch.Tensor:
        """Zeros, and zeros again after every launch. Rows of one launch are fewer than programs that split."""
        if device not in self._arrived:
            self._arrived[device] = torch.zeros(2 * _PROGRAMS, dtype=torch.int32, device=device)
        return self._arrived[device]
