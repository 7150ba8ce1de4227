"""Latent attention of rows that bring one token: cached latents are read once, for scores and as values.

All query heads share the one latent and the one rope key of a cached token, so that a program attends a tile of heads
over a piece of a row's keys: a part of the plan, or a part of a part where there are few rows. The program that owns a
row's last place stores what is new there first. A second kernel joins the pieces of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.latents import latent_shape, walk
from hardpoint_torch_gpu.kernels.skinny import processors
from hardpoint_torch_gpu.limits import limits_of
from hardpoint_torch_gpu.plan import PART_FIELDS, GpuPlan

#: Most pieces that a part is cut into, programs per multiprocessor that are wanted, pieces joined at once, and heads
#: that a program joins in steps with prompts.
_MOST_PIECES, _RESIDENT, _JOINED, _JOINED_HEADS = 4, 2, 16, 4


@triton.jit
def _pieces(length, share, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Of a row: keys per piece, pieces per whole part, pieces in all; at least one."""
    step = tl.cdiv(tl.cdiv(share, SPLIT), BLOCK) * BLOCK
    per = tl.cdiv(share, step)
    before = tl.maximum(length - 1, 0) // share
    return step, per, before * per + tl.maximum(tl.cdiv(length - before * share, step), 1)


@triton.jit
def _keep(new, place, holds, SIZE: tl.constexpr, PAD: tl.constexpr):
    """SIZE numbers from `new` to `place`, where this program `holds` it."""
    at = tl.arange(0, PAD)
    numbers = tl.load(new + at, mask=at < SIZE, other=0.0).to(place.dtype.element_ty)
    tl.store(place + at, numbers, mask=at < tl.where(holds, SIZE, 0))


@triton.jit(do_not_specialize=["table_row"])
def _mla_decode(
    q_ptr, rope_ptr, new_c_ptr, new_r_ptr, c_ptr, r_ptr, table_ptr, lengths_ptr, parts_ptr, out_ptr, mixed_ptr,
    level_ptr, scale, q_token, q_head, rope_token, rope_head, new_c_row, new_r_row, table_row, page_c, slot_c, page_r,
    slot_r, out_token, out_head, HEADS: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, PAGE: tl.constexpr, STORE: tl.constexpr, SPLIT: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    index, sub = tl.program_id(1) // SPLIT, tl.program_id(1) % SPLIT
    part = parts_ptr + index * FIELDS
    row = tl.load(part)
    if row < 0:
        after_others(AHEAD)
        return
    token = tl.load(part + 1).to(tl.int64)
    number, share = tl.load(part + 2), tl.load(part + 3)
    length = tl.load(lengths_ptr + row)
    after_others(AHEAD)
    step, _per, used = _pieces(length, share, BLOCK, SPLIT)
    start = number * share + sub * step
    stop = tl.minimum(tl.minimum(start + step, (number + 1) * share), length)
    if (start >= stop) & ((length > 0) | (sub > 0)):
        return

    h, c, r = tl.arange(0, TILE), tl.arange(0, C_PAD), tl.arange(0, R_PAD)
    head = tl.program_id(0) * TILE + h
    real = head < HEADS
    if STORE:
        # Programs of other heads store the same numbers in the same place; none of another piece reads it.
        home = tl.load(table_ptr + row.to(tl.int64) * table_row + tl.maximum(length - 1, 0) // PAGE).to(tl.int64)
        slot, holds = tl.maximum(length - 1, 0) % PAGE, (stop == length) & (length > 0)
        _keep(new_c_ptr + token * new_c_row, c_ptr + home * page_c + slot * slot_c, holds, C, C_PAD)
        _keep(new_r_ptr + token * new_r_row, r_ptr + home * page_r + slot * slot_r, holds, R, R_PAD)
        tl.debug_barrier()  # the walk below reads it
    q = tl.load(
        q_ptr + token * q_token + head[:, None] * q_head + c[None, :], mask=real[:, None] & (c < C)[None, :], other=0.0
    )
    turned = tl.load(
        rope_ptr + token * rope_token + head[:, None] * rope_head + r[None, :],
        mask=real[:, None] & (r < R)[None, :], other=0.0,
    )  # fmt: skip
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, C_PAD], tl.float32)
    at = tl.full([TILE], 0, tl.int32) + (length - 1)
    best, total, mixed = walk(
        start, stop, stop, q, turned, at, c_ptr, r_ptr, table_ptr, row, scale, table_row, page_c, slot_c, page_r,
        slot_r, best, total, mixed, C, C_PAD, R, R_PAD, PAGE, BLOCK, True,
    )  # fmt: skip
    y = mixed / tl.where(total > 0, total, 1.0)[:, None]
    if used == 1:
        target = out_ptr + token * out_token + head[:, None] * out_head + c[None, :]
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (c < C)[None, :])
    else:
        place = tl.program_id(1).to(tl.int64) * HEADS + head
        tl.store(mixed_ptr + place[:, None] * C_PAD + c[None, :], y, mask=real[:, None])
        tl.store(level_ptr + place, best + tl.log2(total), mask=real)


@triton.jit
def _mla_join(
    parts_ptr, lengths_ptr, out_ptr, mixed_ptr, level_ptr, out_token, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, JOIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The pieces of a row, JOIN at once, for WIDTH numbers of GROUP heads; its first part does it."""
    index = tl.program_id(0)
    part = parts_ptr + index * FIELDS
    row, token, number, share = tl.load(part), tl.load(part + 1), tl.load(part + 2), tl.load(part + 3)
    length = tl.load(lengths_ptr + tl.maximum(row, 0))
    after_others(AHEAD)
    if (row < 0) | (number > 0):
        return
    _step, per, used = _pieces(length, share, BLOCK, SPLIT)
    if used == 1:
        return
    s, w = tl.arange(0, JOIN), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    for nth in range(GROUP):
        head = tl.program_id(1) * GROUP + nth
        highest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        joined = tl.zeros([WIDTH], tl.float32)
        for at in range(0, used, JOIN):
            piece = at + s
            there = piece < tl.where(head < HEADS, used, 0)
            place = ((index + piece // per) * SPLIT + piece % per).to(tl.int64) * HEADS + head
            level = tl.load(level_ptr + place, mask=there, other=float("-inf"))
            mixes = tl.load(mixed_ptr + place[:, None] * C_PAD + w[None, :], mask=there[:, None], other=0.0)
            higher = tl.maximum(highest, tl.max(level, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            factor = tl.exp2(level - base)
            shrink = tl.exp2(highest - base)
            total = total * shrink + tl.sum(factor, 0)
            joined = joined * shrink + tl.sum(mixes * factor[:, None], 0)
            highest = higher
        target = out_ptr + token.to(tl.int64) * out_token + head * out_head + w
        y = joined / tl.where(total > 0, total, 1.0)
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=w < tl.where(head < HEADS, C, 0))


def mla_decode(
    q: torch.Tensor,
    rope: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    latents: torch.Tensor,
    keys: torch.Tensor,
    plan: GpuPlan,
    group: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Rows with parts in `plan`: absorbed queries q [h, T, c] and rotated ones [T, h, dr]; into out [h, T, c].

    latents, keys: pools [pages, page, 1, c] and [pages, page, 1, dr]. `new`: latents [T, c] and rope keys [T, dr] of
    the step's tokens, to be stored; None where they are stored already.
    """
    parts = len(plan.parts)
    if not parts:
        return
    heads, _, width = q.shape
    turned = rope.shape[-1]
    c_pad, r_pad = (max(16, triton.next_power_of_2(size)) for size in (width, turned))
    shape = latent_shape(limits_of(q.device), heads, c_pad + r_pad, q.dtype)
    tiles = triton.cdiv(heads, shape.tile)
    table = plan.tables[group]
    # Steps that store here are recorded before serving, the others compile at their first use: these in one way.
    split = 1 if new is None else _split(parts * tiles, q.device)
    mixed = torch.empty((parts * split, heads, c_pad), dtype=torch.float32, device=q.device)
    level = torch.empty((parts * split, heads), dtype=torch.float32, device=q.device)
    new_c, new_r = new or (q, q)
    _mla_decode[(tiles, parts * split)](
        q, rope, new_c, new_r, latents, keys, table, plan.lengths, plan.parts, out, mixed, level, scale,
        q.stride(1), q.stride(0), rope.stride(0), rope.stride(1), new_c.stride(0), new_r.stride(0), table.stride(0),
        latents.stride(0), latents.stride(1), keys.stride(0), keys.stride(1), out.stride(1), out.stride(0),
        HEADS=heads, TILE=shape.tile, C=width, C_PAD=c_pad, R=turned, R_PAD=r_pad, PAGE=plan.page_tokens,
        STORE=new is not None, SPLIT=split, FIELDS=PART_FIELDS, BLOCK=shape.block, num_warps=shape.warps,
        num_stages=shape.stages, **ahead(q),
    )  # fmt: skip
    group_heads, columns = (_JOINED_HEADS, c_pad) if new is None else _join_shape(parts, heads, c_pad, q.device)
    _mla_join[(parts, triton.cdiv(heads, group_heads), c_pad // columns)](
        plan.parts, plan.lengths, out, mixed, level, out.stride(1), out.stride(0), HEADS=heads, GROUP=group_heads,
        C=width, C_PAD=c_pad, WIDTH=columns, SPLIT=split, FIELDS=PART_FIELDS, BLOCK=shape.block, JOIN=_JOINED,
        num_warps=4, **ahead(q),
    )  # fmt: skip


def _split(programs: int, device: torch.device) -> int:
    """Pieces per part: parts alone may be too few for a large GPU, as they were made for several heads of keys."""
    split = 1
    while split < _MOST_PIECES and programs * split < _RESIDENT * processors(device):
        split *= 2
    return split


def _join_shape(parts: int, heads: int, width: int, device: torch.device) -> tuple[int, int]:
    """Heads and numbers of each that one program joins: about as many programs with work as keep the GPU busy.

    Decode steps have 64 parts more than twice their rows.
    """
    rows, wanted = max((parts - 64) // 2, 1), 4 * processors(device)
    if rows * heads >= wanted:
        return triton.next_power_of_2(min(rows * heads // wanted, heads)), width
    columns = width
    while columns > 64 and rows * heads * (width // columns) < wanted:
        columns //= 2
    return 1, columns
