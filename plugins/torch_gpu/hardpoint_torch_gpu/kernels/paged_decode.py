"""Paged attention of rows that bring one token: their keys are cut into parts of like size, and the last part joins.

One program attends all query heads that share a head of keys over one part, so that each key is read once. The program
that owns a row's last place also stores the new key and value there, instead of reading them. Where rows share pages, a
launch before has attended their keys (`paged_shared.py`): parts hold the keys behind these, and the first part of a row
sets out from what was found there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.paged_shared import attend_shared
from hardpoint_torch_gpu.kernels.softmax import LOG2E, add, fold, pages, scores, with_sink
from hardpoint_torch_gpu.limits import Limits, limits_of
from hardpoint_torch_gpu.plan import BLOCK, PART_FIELDS, GpuPlan
from hardpoint_torch_gpu.rule import ScoreRule
from hardpoint_torch_gpu.sharing import OWN_FIELDS

#: Warps, steps of the loop that are loaded ahead, and numbers that a join holds at once. All three decide how many
#: registers the kernel takes, and so how many programs run at once: on an H200 the fastest of 12 shapes.
WARPS, STAGES, _JOINED = 2, 2, 2048
#: Up to so many programs each reads keys in larger blocks, on more warps: so few do not keep memory busy otherwise.
_FEW, _FEW_BLOCK, _FEW_WARPS = 1280, 64, 4
#: Keys per step where those do not fit in shared memory.
_SMALLEST = 16


def shape_for(limits: Limits, few: bool, heads: int, widths: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Keys per step, warps, stages. `heads` share keys; a key and its value have `widths` numbers together."""
    for block, warps in ((_FEW_BLOCK, _FEW_WARPS),) * few + ((BLOCK, WARPS),):
        step = block * widths * dtype.itemsize
        stages = limits.stages(STAGES, step)
        held = limits.held(stages, step) + heads * block * dtype.itemsize
        if held <= limits.shared_bytes and limits.eases(step // 2):
            return block, warps, stages
    return _SMALLEST, WARPS, limits.stages(STAGES, _SMALLEST * widths * dtype.itemsize)


@triton.jit
def _join(
    first, count, kv_head, token, sinks_ptr, out_ptr, mixed_ptr, best_ptr, total_ptr,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SHARED_TWO: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    SINKS: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """`count` parts of a row from part `first` on, JOIN at once, into out."""
    h, s, dv = tl.arange(0, SHARED_TWO), tl.arange(0, JOIN), tl.arange(0, DV_PAD)
    heads = kv_head * SHARED + h
    highest = tl.full([SHARED_TWO], float("-inf"), tl.float32)
    total = tl.zeros([SHARED_TWO], tl.float32)
    joined = tl.zeros([SHARED_TWO, DV_PAD], tl.float32)
    if SINKS:
        highest = tl.load(sinks_ptr + heads, mask=h < SHARED, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    for at in range(0, count, JOIN):
        there = (at + s < count)[None, :] & (h < SHARED)[:, None]
        each = (first + at + s)[None, :].to(tl.int64) * HEADS + heads[:, None]
        bests = tl.load(best_ptr + each, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(total_ptr + each, mask=there, other=0.0, cache_modifier=".cg")
        mixes = tl.load(
            mixed_ptr + each[:, :, None] * DV + dv[None, None, :],
            mask=there[:, :, None] & (dv < DV)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(bests, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # heads of padding
        factor = tl.exp2(bests - level[:, None])
        shrink = tl.exp2(highest - level)
        total = total * shrink + tl.sum(totals * factor, 1)
        joined = joined * shrink[:, None] + tl.sum(mixes * factor[:, :, None], 1)
        highest = higher
    y = tl.where(total[:, None] > 0, joined / total[:, None], 0.0)
    target = (token * HEADS + heads[:, None]) * DV + dv[None, :]
    tl.store(out_ptr + target, y.to(out_ptr.dtype.element_ty), mask=(h < SHARED)[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["table_row"])
def _decode(
    q_ptr, new_k_ptr, new_v_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, parts_ptr, slopes_ptr, sinks_ptr,
    out_ptr, mixed_ptr, best_ptr, total_ptr, arrived_ptr, own_ptr, mixed_before_ptr, best_before_ptr, total_before_ptr,
    scale, softcap, q_row, q_head, new_k_row, new_k_head, new_v_row, new_v_head, table_row, page_k, slot_k, head_k,
    page_v, slot_v, head_v,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SHARED_PAD: tl.constexpr, SHARED_TWO: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, STORE: tl.constexpr, JOIN: tl.constexpr,
    FIELDS: tl.constexpr, OWN_FIELDS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    index, kv_head = tl.program_id(0), tl.program_id(1)
    part = parts_ptr + index * FIELDS
    row = tl.load(part)
    if row < 0:
        after_others(AHEAD)
        return
    token = tl.load(part + 1).to(tl.int64)
    number, share = tl.load(part + 2), tl.load(part + 3)
    length = tl.load(lengths_ptr + row)
    before = 0
    if OWN_FIELDS > 0:
        own_of = own_ptr + row * OWN_FIELDS
        before, found, apart, pieces = tl.load(own_of), tl.load(own_of + 1), tl.load(own_of + 2), tl.load(own_of + 3)
    after_others(AHEAD)
    earliest = 0
    if WINDOW > 0:
        earliest = tl.maximum(length - WINDOW, 0)
    stop = tl.minimum(before + (number + 1) * share, length)
    if (stop <= earliest) & (length > 0):
        return  # the window has passed this part
    start = tl.maximum(before + number * share, earliest)
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
    k_ptr += kv_head * head_k
    v_ptr += kv_head * head_v
    if STORE:
        holds = ends & (length > 0)
        last = tl.maximum(length - 1, 0)
        new_k = tl.load(new_k_ptr + token * new_k_row + kv_head * new_k_head + d, mask=d < D, other=0.0)
        new_v = tl.load(new_v_ptr + token * new_v_row + kv_head * new_v_head + dv, mask=dv < DV, other=0.0)
        new_k, new_v = new_k.to(k_ptr.dtype.element_ty), new_v.to(v_ptr.dtype.element_ty)
        home = tl.load(table_ptr + row.to(tl.int64) * table_row + last // PAGE).to(tl.int64)
        slot = last % PAGE
        tl.store(k_ptr + home * page_k + slot * slot_k + d, new_k, mask=d < tl.where(holds, D, 0))
        tl.store(v_ptr + home * page_v + slot * slot_v + dv, new_v, mask=dv < tl.where(holds, DV, 0))
        own = scores(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1), scale, softcap, SOFTCAP)
        best = tl.where(holds, own, best)
        total = tl.where(holds, total + 1.0, total)
        mixed = tl.where(holds, mixed + new_v.to(tl.float32)[None, :], mixed)
    if OWN_FIELDS > 0:
        for piece in range(tl.where(number == 0, pieces, 0)):
            slot_of = (found + piece * apart).to(tl.int64) * HEADS + head
            best, total, mixed = add(
                tl.load(best_before_ptr + slot_of, mask=real, other=float("-inf")),
                tl.load(total_before_ptr + slot_of, mask=real, other=0.0),
                tl.load(
                    mixed_before_ptr + slot_of[:, None] * DV + dv[None, :], mask=real[:, None] & (dv < DV)[None, :],
                    other=0.0,
                ),
                best, total, mixed,
            )  # fmt: skip
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=real, other=0.0) * LOG2E
    for at in range(start, stop, BLOCK):
        position = at + n
        inside = position < stop
        page, within = pages(table_ptr, row, table_row, position, inside, PAGE, True), position % PAGE
        k = tl.load(
            k_ptr + (page * page_k + within * slot_k)[None, :] + d[:, None],
            mask=inside[None, :] & (d < D)[:, None], other=0.0,
        )  # fmt: skip
        score = scores(tl.dot(q, k.to(q.dtype), input_precision=PRECISION), scale, softcap, SOFTCAP)
        if ALIBI:
            score += slope[:, None] * (position - (length - 1))[None, :].to(tl.float32)
        score = tl.where(inside[None, :], score, float("-inf"))
        v = tl.load(
            v_ptr + (page * page_v + within * slot_v)[:, None] + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :], other=0.0,
        )  # fmt: skip
        best, total, mixed = fold(score, v.to(q.dtype), best, total, mixed, PRECISION, False)

    skipped = earliest // share
    used = tl.maximum(tl.cdiv(length - before, share), 1) - skipped
    if used > 1:
        place = index.to(tl.int64) * HEADS + head
        tl.store(mixed_ptr + place[:, None] * DV + dv[None, :], mixed, mask=real[:, None] & (dv < DV)[None, :])
        tl.store(best_ptr + place, best, mask=real)
        tl.store(total_ptr + place, total, mask=real)
        tl.debug_barrier()  # the whole program has stored before it says so
        base = index - number
        counter = arrived_ptr + base * tl.num_programs(1) + kv_head
        if tl.atomic_add(counter, 1) < used - 1:
            return
        tl.store(counter, 0)
        _join(
            base + skipped, used, kv_head, token, sinks_ptr, out_ptr, mixed_ptr, best_ptr, total_ptr,
            HEADS, SHARED, SHARED_TWO, DV, DV_PAD, SINKS, JOIN,
        )  # fmt: skip
    else:
        if SINKS:
            total, mixed = with_sink(tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32), best, total, mixed)
        y = tl.where(total[:, None] > 0, mixed / total[:, None], 0.0)
        spot = (token * HEADS + head[:, None]) * DV + dv[None, :]
        tl.store(out_ptr + spot, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])


class PagedDecode:
    """Launches the kernel. Owns the counters by which the programs of a row know the last of them."""

    def __init__(self) -> None:
        #: The last of a device is the largest; graphs still use the others.
        self._arrived: dict[torch.device, list[torch.Tensor]] = {}

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
        """Rows with parts in `plan` of q [T, h, d] against keys and values [pages, page, hk, d]; into out [T, h, dv].

        `new`: keys and values of the step's tokens, [T, hk, d], to be stored; None where they are stored already.
        """
        sharing = plan.shared(group, rule)
        held = plan.parts if sharing is None else sharing.parts
        parts = len(held)
        if not parts:
            return
        _, heads, width = q.shape
        kv_heads, v_width = keys.shape[2], values.shape[-1]
        shared = heads // kv_heads
        table = plan.tables[group]
        # Steps of decodes alone are recorded before serving, the others compile at their first use: these in one way,
        # as those with shared pages, which are few.
        few = plan.decodes_alone and sharing is None and parts * kv_heads <= _FEW
        mixed = torch.empty((parts, heads, v_width), dtype=torch.float32, device=q.device)
        # Apart, so that both are aligned whatever the number of parts: for one that is not another kernel is compiled.
        best, total = (torch.empty((parts, heads), dtype=torch.float32, device=q.device) for _ in range(2))
        before = (held, mixed, best, total)
        if sharing is not None:
            before = (sharing.own, *attend_shared(q, keys, values, plan, group, sharing, rule))
        k, v = new or (q, q)
        d_pad, v_pad = max(16, triton.next_power_of_2(width)), max(16, triton.next_power_of_2(v_width))
        shared_two = triton.next_power_of_2(shared)
        block, warps, stages = shape_for(limits_of(q.device), few, max(16, shared_two), d_pad + v_pad, q.dtype)
        _decode[(parts, kv_heads)](
            q, k, v, keys, values, table, plan.lengths, held, rule.slopes(q.device), q if sinks is None else sinks, out,
            mixed, best, total, self._counters(q.device, parts * kv_heads), *before, rule.scale, rule.softcap or 0.0,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), table.stride(0),
            keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
            HEADS=heads, SHARED=shared, SHARED_PAD=max(16, shared_two), SHARED_TWO=shared_two, D=width, D_PAD=d_pad,
            DV=v_width, DV_PAD=v_pad, PAGE=plan.page_tokens, WINDOW=rule.window or 0,
            SOFTCAP=rule.softcap is not None, ALIBI=rule.alibi is not None, SINKS=sinks is not None,
            STORE=new is not None, JOIN=min(16, max(1, _JOINED // (shared_two * v_pad))), FIELDS=PART_FIELDS,
            OWN_FIELDS=0 if sharing is None else OWN_FIELDS, BLOCK=block, PRECISION="ieee", num_warps=warps,
            num_stages=stages, **ahead(q),
        )  # fmt: skip

    def _counters(self, device: torch.device, count: int) -> torch.Tensor:
        """Zeros, and zeros again after every launch."""
        made = self._arrived.setdefault(device, [])
        if not made or len(made[-1]) < count:
            made.append(torch.zeros(max(count, 1 << 16), dtype=torch.int32, device=device))
        return made[-1]
