"""Keys of pages that several decoding rows share: queries of a tile of rows attend them in one program.

Each unit of the plan is a tile with some of its keys. For every member it leaves best, total and mixed values in a
slot, from which the row's first part of other keys sets out (`paged_decode.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.paged_prefill import Shape, largest, walk
from hardpoint_torch_gpu.limits import Limits, limits_of
from hardpoint_torch_gpu.plan import GpuPlan
from hardpoint_torch_gpu.rule import ScoreRule
from hardpoint_torch_gpu.sharing import STEP, UNIT_FIELDS, Sharing

#: Rows of queries, keys per step, warps, from the largest; steps that are loaded ahead. Keys per step divide `STEP`.
_CUTS = ((64, 64, 4), (64, 32, 4), (64, 16, 4), (32, 16, 4))
STAGES = 2
#: For float32, multiplied number by number: small code.
_FLOAT32 = ((32, 16, 4),)
#: Farther than any key: every query of a tile sees all keys that the tile shares.
_FAR = 1 << 30


def shape_for(limits: Limits, width: int, v_width: int, dtype: torch.dtype) -> Shape:
    """The largest that fits; sizes of heads are powers of two."""
    cuts = _FLOAT32 if dtype is torch.float32 else _CUTS[1:] if max(width, v_width) > 128 else _CUTS
    return largest(limits, cuts, STAGES, width, v_width, dtype)


@triton.jit(do_not_specialize=["table_row"])
def _shared(
    q_ptr, k_ptr, v_ptr, table_ptr, starts_ptr, units_ptr, members_ptr, mixed_ptr, best_ptr, total_ptr, scale, softcap,
    q_row, q_head, table_row, page_k, slot_k, head_k, page_v, slot_v, head_v,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SHARED_TWO: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, FIELDS: tl.constexpr, FAR: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    unit, kv_head = units_ptr + tl.program_id(0) // PIECES * FIELDS, tl.program_id(1)
    skipped = tl.program_id(0) % PIECES * (ROWS // SHARED_TWO)
    count = tl.load(unit)
    if count <= skipped:
        after_others(AHEAD)
        return
    place, start, stop, slot = tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3), tl.load(unit + 4)
    r, d, dv = tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    member, head = skipped + r // SHARED_TWO, kv_head * SHARED + r % SHARED_TWO
    there = member < count
    real = there & (r % SHARED_TWO < SHARED)
    row = tl.load(members_ptr + place + member, mask=there, other=0)
    token = tl.load(starts_ptr + row, mask=there, other=0).to(tl.int64)
    leader = tl.load(members_ptr + place)  # the pages are the same in every member's table
    after_others(AHEAD)

    q = tl.load(
        q_ptr + (token * q_row + head * q_head)[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DV_PAD], tl.float32)
    at = tl.full([ROWS], FAR, tl.int32)
    k_ptr += kv_head * head_k
    v_ptr += kv_head * head_v
    plain = start + (stop - start) // BLOCK * BLOCK
    best, total, mixed = walk(
        start, plain, q, at, k_ptr, v_ptr, table_ptr, leader, stop, 0.0, scale, softcap, table_row, page_k, slot_k,
        page_v, slot_v, best, total, mixed, D, D_PAD, DV, DV_PAD, PAGE, 0, SOFTCAP, False, BLOCK, PRECISION, False,
    )  # fmt: skip
    if PAGE % BLOCK != 0:
        best, total, mixed = walk(
            plain, stop, q, at, k_ptr, v_ptr, table_ptr, leader, stop, 0.0, scale, softcap, table_row, page_k, slot_k,
            page_v, slot_v, best, total, mixed, D, D_PAD, DV, DV_PAD, PAGE, 0, SOFTCAP, False, BLOCK, PRECISION, True,
        )  # fmt: skip
    spot = (slot + member).to(tl.int64) * HEADS + head
    tl.store(mixed_ptr + spot[:, None] * DV + dv[None, :], mixed, mask=real[:, None] & (dv < DV)[None, :])
    tl.store(best_ptr + spot, best, mask=real)
    tl.store(total_ptr + spot, total, mask=real)


def attend_shared(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: GpuPlan,
    group: int,
    sharing: Sharing,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Members of the tiles of `sharing`, among q [T, h, d], against the keys that they share.

    keys, values: [pages, page, hk, d or dv], the pages of cache group `group`. Window and ALiBi of the rule are not
    looked at. Returns by slot, float32: values mixed [slots, h, dv], best and total [slots, h].
    """
    _, heads, width = q.shape
    kv_heads, v_width = keys.shape[2], values.shape[-1]
    shared = heads // kv_heads
    shared_two = triton.next_power_of_2(shared)
    d_pad, v_pad = max(16, triton.next_power_of_2(width)), max(16, triton.next_power_of_2(v_width))
    shape = shape_for(limits_of(q.device), d_pad, v_pad, q.dtype)
    rows = max(16, shared_two, min(shape.queries, sharing.tile * shared_two))
    pieces = triton.cdiv(sharing.tile * shared_two, rows)
    mixed = torch.empty((sharing.slots, heads, v_width), dtype=torch.float32, device=q.device)
    best, total = (torch.empty((sharing.slots, heads), dtype=torch.float32, device=q.device) for _ in range(2))
    table = plan.tables[group]
    assert STEP % shape.block == 0, "units would end within a step"
    _shared[(len(sharing.units) * pieces, kv_heads)](
        q, keys, values, table, plan.starts, sharing.units, sharing.members, mixed, best, total,
        rule.scale, rule.softcap or 0.0, q.stride(0), q.stride(1), table.stride(0), keys.stride(0), keys.stride(1),
        keys.stride(2), values.stride(0), values.stride(1), values.stride(2), HEADS=heads, SHARED=shared,
        SHARED_TWO=shared_two, D=width, D_PAD=d_pad, DV=v_width, DV_PAD=v_pad, PAGE=plan.page_tokens,
        SOFTCAP=rule.softcap is not None, PIECES=pieces, ROWS=rows, FIELDS=UNIT_FIELDS, FAR=_FAR, BLOCK=shape.block,
        PRECISION="ieee", num_warps=shape.warps, num_stages=shape.stages, **ahead(q),
    )  # fmt: skip
    return mixed, best, total
