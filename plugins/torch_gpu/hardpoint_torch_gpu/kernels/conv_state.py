"""Short causal convolution over paged state: one launch for rows of one token, two for rows of several.

A row's state, its last taps - 1 inputs, lies at token 0 of its first page. A thread has one channel throughout, so that
shifting the state in place never meets another thread's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.plan import TILE as QUERIES
from hardpoint_torch_gpu.plan import GpuPlan

#: Channels per program with one token, and tokens and channels per program of a tile.
_CHANNELS, _TOKENS, _ACROSS = 256, 32, 64


@triton.jit
def _activated(x, SILU: tl.constexpr):
    return x / (1.0 + tl.exp(-x)) if SILU else x


@triton.jit(do_not_specialize=["table_row"])
def _conv_decode(
    x_ptr, w_ptr, bias_ptr, state_ptr, table_ptr, starts_ptr, lengths_ptr, y_ptr, channels, table_row, x_row, y_row,
    page, tap_row, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, CLEAR: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows of one token: y and the new state. CLEAR: rows without a token have a place in y all the same."""
    c, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside = c < channels
    begin, end, length = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1), tl.load(lengths_ptr + row)
    home = tl.load(table_ptr + row.to(tl.int64) * table_row).to(tl.int64)
    after_others(AHEAD)
    if end - begin != 1:
        if CLEAR:
            blank = tl.zeros([BLOCK], tl.float32).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row.to(tl.int64) * y_row + c, blank, mask=inside)
        return
    state = state_ptr + home * page + c
    known = c < tl.where(length > 1, channels, 0)
    total = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + c, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS - 1):
        before = tl.load(state + tap * tap_row, mask=known, other=0.0)
        total += before.to(tl.float32) * tl.load(w_ptr + tap * channels + c, mask=inside, other=0.0)
        if tap > 0:
            tl.store(state + (tap - 1) * tap_row, before, mask=inside)
    x = tl.load(x_ptr + begin.to(tl.int64) * x_row + c, mask=inside, other=0.0)
    total += x.to(tl.float32) * tl.load(w_ptr + (TAPS - 1) * channels + c, mask=inside, other=0.0)
    tl.store(state + (TAPS - 2) * tap_row, x.to(state_ptr.dtype.element_ty), mask=inside)
    y = _activated(total, SILU).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + begin.to(tl.int64) * y_row + c, y, mask=inside)


@triton.jit(do_not_specialize=["table_row"])
def _conv_tiles(
    x_ptr, w_ptr, bias_ptr, state_ptr, table_ptr, starts_ptr, lengths_ptr, tile_rows_ptr, tile_firsts_ptr, y_ptr,
    channels, table_row, x_row, y_row, page, tap_row, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    SUBS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens of rows with several: all read the state before any program writes it, in `_conv_keep`."""
    tile, c = tl.program_id(1) // SUBS, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(tile_rows_ptr + tile)
    begin, end, length = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1), tl.load(lengths_ptr + row)
    first, count = tl.load(tile_firsts_ptr + tile) + tl.program_id(1) % SUBS * TOKENS, end - begin
    if first >= count:
        return
    state = state_ptr + tl.load(table_ptr + row.to(tl.int64) * table_row).to(tl.int64) * page
    t, inside = first + tl.arange(0, TOKENS), c < channels
    real = (t < count)[:, None] & inside[None, :]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + c, mask=inside, other=0.0)[None, :]
    for tap in tl.static_range(TAPS):
        source = t + tap - (TAPS - 1)
        place = x_ptr + (begin + source).to(tl.int64)[:, None] * x_row + c[None, :]
        value = tl.load(place, mask=real & (source >= 0)[:, None], other=0.0).to(tl.float32)
        if tap < TAPS - 1:
            kept = state + (source + TAPS - 1)[:, None] * tap_row + c[None, :]
            early = real & (source < tl.where(length > count, 0, -TAPS))[:, None]
            value += tl.load(kept, mask=early, other=0.0).to(tl.float32)
        total += value * tl.load(w_ptr + tap * channels + c, mask=inside, other=0.0)[None, :]
    y = _activated(total, SILU).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (begin + t).to(tl.int64)[:, None] * y_row + c[None, :], y, mask=real)


@triton.jit(do_not_specialize=["table_row"])
def _conv_keep(
    x_ptr, state_ptr, table_ptr, starts_ptr, lengths_ptr, channels, table_row, x_row, page, tap_row,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The new state of rows with several tokens."""
    c, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    begin, end, length = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1), tl.load(lengths_ptr + row)
    count = end - begin
    if count < 2:
        return
    inside = c < channels
    state = state_ptr + tl.load(table_ptr + row.to(tl.int64) * table_row).to(tl.int64) * page + c
    for tap in tl.static_range(TAPS - 1):
        source = count + tap - (TAPS - 1)
        new = c < tl.where(source >= 0, channels, 0)
        x = tl.load(x_ptr + (begin + source).to(tl.int64) * x_row + c, mask=new, other=0.0)
        old = c < tl.where((source < 0) & (length > count), channels, 0)
        before = tl.load(state + (count + tap) * tap_row, mask=old, other=0.0)
        after = tl.where(new, x.to(tl.float32), before.to(tl.float32))
        tl.store(state + tap * tap_row, after.to(state_ptr.dtype.element_ty), mask=inside)


def conv_state(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    cache: torch.Tensor,
    plan: GpuPlan,
    group: int,
    y: torch.Tensor,
) -> None:
    """x [T, C] into y [T, C]; taps float32 [k, C], bias float32 [C].

    cache [pages, page, k - 1, C] gets the new states.
    """
    table, channels = plan.tables[group], x.shape[1]
    rows, tiles = len(plan.lengths), len(plan.tile_rows)
    places = (plan.starts, plan.lengths)
    weights = (taps, taps if bias is None else bias)
    switches = {"TAPS": taps.shape[0], "BIAS": bias is not None, "SILU": silu}
    if len(plan.parts):
        _conv_decode[(triton.cdiv(channels, _CHANNELS), rows)](
            x, *weights, cache, table, *places, y, channels, table.stride(0), x.stride(0), y.stride(0),
            cache.stride(0), cache.stride(2), **switches, CLEAR=not tiles and rows == len(x), BLOCK=_CHANNELS,
            num_warps=2, **ahead(x),
        )  # fmt: skip
    if tiles:
        subs = QUERIES // _TOKENS
        _conv_tiles[(triton.cdiv(channels, _ACROSS), tiles * subs)](
            x, *weights, cache, table, *places, plan.tile_rows, plan.tile_firsts, y, channels, table.stride(0),
            x.stride(0), y.stride(0), cache.stride(0), cache.stride(2), **switches, SUBS=subs, TOKENS=_TOKENS,
            BLOCK=_ACROSS, num_warps=4,
        )  # fmt: skip
        _conv_keep[(triton.cdiv(channels, _CHANNELS), rows)](
            x, cache, table, *places, channels, table.stride(0), x.stride(0), cache.stride(0), cache.stride(2),
            TAPS=taps.shape[0], BLOCK=_CHANNELS, num_warps=2,
        )  # fmt: skip
