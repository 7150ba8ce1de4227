"""Mixture of experts as grouped products: slots sorted by expert, then one kernel for both products, then a sum.

A slot is one expert of one token: slot t * k + j for the j-th of token t. All shapes follow from those of the
arguments, nothing is read on the host, and no order of sums is left to chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.activation import KINDS, activated
from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.eight_bit_gemm import EightBitWeight, added, empty_sums, repeats, scaled
from hardpoint_torch_gpu.kernels.quant_codes import codes
from hardpoint_torch_gpu.kernels.quant_gemm import QuantWeight, decoded, read_words, register_dot
from hardpoint_torch_gpu.kernels.round_input import Rounded
from hardpoint_torch_gpu.kernels.rows import read_rows
from hardpoint_torch_gpu.limits import limits_of

#: Slots that a program of `_route` looks at in a turn, where there are few and where there are many.
_FEW, _MANY = 512, 4096
#: Tiles that it writes in a turn.
_TILES = 64
#: Columns per program of `_combine`.
_COLUMNS = 1024


@dataclass(frozen=True)
class Cut:
    """How a grouped product is cut.

    Attributes:
        rows: of an expert's weight per program; of a gated one half of them are gates.
        tokens: slots per tile, of one expert.
        columns: per step.
        warps, stages: of a program.
    """

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Epilogue:
    """What becomes of the sums of a product.

    Attributes:
        gated: the weight's rows are gates and ups; else each row is an output.
        interleaved: gates and ups alternate; else the gates come first.
        kind: of the activation, None for none.
        limit, offset: as in `gated_activation`.
        early: the slot's weight is multiplied before the bias.
        late: the slot's weight is multiplied last.
    """

    gated: bool = False
    interleaved: bool = False
    kind: str | None = None
    limit: float | None = None
    offset: float = 0.0
    early: bool = False
    late: bool = False


@dataclass(frozen=True, eq=False)
class Routing:
    """Slots by expert.

    Attributes:
        order: int32 [slots], slots by expert, of one expert in their own order.
        tiles: int32 [tiles, 4]: expert, first place in `order`, the expert's end there, unused. Empty ones start at
            their end.
        share: float [slots], the weight of each slot.
        top_k: slots per token.
        tokens: slots per tile at most.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    share: torch.Tensor
    top_k: int
    tokens: int


@triton.jit(do_not_specialize=["slots"])
def _route(
    ids_ptr, order_ptr, tiles_ptr, slots,
    DENSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One expert per program: its place among the sorted slots, its slots in order, and its tiles.

    Where its tiles begin follows from the slots before it alone: with c slots ceil(c / BLOCK_M) tiles are needed, and
    both floor((before + c) / BLOCK_M) + 1 - floor(before / BLOCK_M) and c (DENSE) are as many or more.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    after_others(AHEAD)
    for first in range(0, slots, BLOCK):
        inside = first + at < slots
        ids = tl.load(ids_ptr + first + at, mask=inside, other=0).to(tl.int32)
        lower += (inside & (ids < expert)).to(tl.int32)
        own += (inside & (ids == expert)).to(tl.int32)
    begin, count = tl.sum(lower, 0), tl.sum(own, 0)
    end = begin + count
    if DENSE:
        tile, last = begin, end
    else:
        tile, last = begin // BLOCK_M + expert, end // BLOCK_M + expert + 1
    for done in range(0, last - tile, TILES):
        number = done + tl.arange(0, TILES)
        entry = tiles_ptr + (tile + number) * 4
        inside = number < last - tile
        tl.store(entry, tl.zeros_like(number) + expert, mask=inside)
        tl.store(entry + 1, tl.minimum(begin + number * BLOCK_M, end), mask=inside)
        tl.store(entry + 2, tl.zeros_like(number) + end, mask=inside)
    if count > 0:
        place = begin
        for first in range(0, slots, BLOCK):
            ids = tl.load(ids_ptr + first + at, mask=first + at < slots, other=-1).to(tl.int32)
            mine = (ids == expert).to(tl.int32)
            tl.store(order_ptr + place + tl.cumsum(mine, 0) - mine, first + at, mask=mine == 1)
            place += tl.sum(mine, 0)


@triton.jit
def _rows_of(n, expert, rows, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows of all experts' weights for row n of the tiles, where gates and ups lie side by side; the last for more."""
    if GATED:
        out = tl.minimum(n // 2, rows - 1)
        if INTERLEAVED:
            row = expert * (2 * rows) + 2 * out + n % 2
        else:
            row = expert * (2 * rows) + n % 2 * rows + out
    else:
        row = expert * rows + tl.minimum(n, rows - 1)
    return row


@triton.jit
def _finished(
    total, share, limit, offset, GATED: tl.constexpr, KIND: tl.constexpr, ACTIVATE: tl.constexpr,
    LIMIT: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Sums [rows, tokens] -> outputs, of a gated weight half as many rows."""
    if GATED:
        pairs = total.reshape(total.shape[0] // 2, 2, total.shape[1]).permute(0, 2, 1)
        gate, up = tl.split(pairs)
        if LIMIT:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        y = activated(gate, KIND) * (up + offset)
    elif ACTIVATE:
        y = activated(total, KIND)
    else:
        y = total
    if LATE:
        y = y * share
    return y


@triton.jit
def _weights(
    w_ptr, scales_ptr, offsets_ptr, book_ptr, row, k, first, columns, planes, groups, stride, dtype: tl.constexpr,
    QUANT: tl.constexpr, BYTES: tl.constexpr, TABLE: tl.constexpr, FLOATS: tl.constexpr, SIGNED: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Rows `row` of the weight, columns k, which begin with `first`; 0 behind the last one."""
    if QUANT:
        words = read_words(w_ptr, first, planes, stride, row, k.shape[0], 16 if BYTES else 32, EVEN)
        q = codes(words, book_ptr, dtype, BYTES, TABLE, FLOATS, SIGNED)
        w = decoded(q, scales_ptr, offsets_ptr, first, groups, stride, row, dtype, OFFSET, GROUP, True)
    elif EVEN:
        w = tl.load(w_ptr + row.to(tl.int64)[:, None] * columns + k[None, :])
    else:
        w = tl.load(w_ptr + row.to(tl.int64)[:, None] * columns + k[None, :], mask=k[None, :] < columns, other=0.0)
    return w


@triton.jit(do_not_specialize=["x_rows", "top_k"])
def _grouped(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, offsets_ptr, book_ptr, bias_ptr, share_ptr, order_ptr, tiles_ptr, y_ptr,
    rows, columns, x_rows, top_k, tiles_n, planes, groups, stride, limit, offset,
    QUANT: tl.constexpr, BYTES: tl.constexpr, TABLE: tl.constexpr, FLOATS: tl.constexpr, SIGNED: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, EIGHT: tl.constexpr, INTEGER: tl.constexpr, X_GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr, REPEAT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr, ACTIVATE: tl.constexpr, LIMIT: tl.constexpr,
    BIAS: tl.constexpr, EARLY: tl.constexpr, LATE: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of slots times some rows of its expert's weight, which is the left operand: decode has few slots.

    GATHER: rows of x are tokens and those of y places in the order; else the reverse, rows of y being slots.
    EIGHT: x and w are 8-bit numbers, see `eight_bit_gemm`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    HALVES: tl.constexpr = 2 if GATED else 1
    WHOLE: tl.constexpr = EIGHT and GROUP == 0 and X_GROUP == 0
    tile_n = tl.program_id(0) % tiles_n
    entry = tiles_ptr + (tl.program_id(0) // tiles_n) * 4
    after_others(AHEAD)
    expert, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if first >= end:
        return
    place = first + tl.arange(0, BLOCK_M)
    slot = tl.load(order_ptr + tl.minimum(place, end - 1))
    x_row = slot // top_k if GATHER else tl.minimum(place, end - 1)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = _rows_of(n, expert, rows, GATED, INTERLEAVED)
    x_start = x_ptr + x_row.to(tl.int64)[None, :] * columns
    sums = empty_sums(BLOCK_N, BLOCK_M, INTEGER, WHOLE)
    for step in tl.range(0, tl.cdiv(columns, BLOCK_K), num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = read_rows(x_start, k[:, None], (place < end)[None, :], columns, EVEN, False)
        w = _weights(
            w_ptr, scales_ptr, offsets_ptr, book_ptr, row, k, step * BLOCK_K, columns, planes, groups, stride, dtype,
            QUANT, BYTES, TABLE, FLOATS, SIGNED, OFFSET, GROUP, EVEN,
        )  # fmt: skip
        if EIGHT:
            sums = added(
                sums, w, x, scales_ptr, x_scales_ptr, row, x_row, step * BLOCK_K, stride, x_rows,
                GROUP, X_GROUP, GROUP_ROWS, False, REPEAT,
            )  # fmt: skip
        elif QUANT:
            sums = register_dot(w, x, sums)
        else:
            sums = tl.dot(w, x, sums, input_precision="ieee")
    if WHOLE:
        total = scaled(sums, scales_ptr, x_scales_ptr, row, x_row, 0, 0, 0, 0, 0, GROUP_ROWS, False, 1)
    else:
        total = sums
    if EARLY or LATE:
        share = tl.load(share_ptr + slot).to(tl.float32)[None, :]
    else:
        share = 1.0
    if EARLY:
        total = total * share
    if BIAS:
        total = total + tl.load(bias_ptr + row).to(tl.float32)[:, None]
    y = _finished(total, share, limit, offset, GATED, KIND, ACTIVATE, LIMIT, LATE)
    column = tile_n * (BLOCK_N // HALVES) + tl.arange(0, BLOCK_N // HALVES)
    y_row = place if GATHER else slot
    mask = (column < rows)[:, None] & (place < end)[None, :]
    tl.store(y_ptr + y_row.to(tl.int64)[None, :] * rows + column[:, None], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine(parts_ptr, y_ptr, columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """[T, k, columns] -> [T, columns], summed in float32 in the order of the slots."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    after_others(AHEAD)
    for slot in tl.static_range(TOP_K):
        part = parts_ptr + (token * TOP_K + slot) * columns + column
        total += tl.load(part, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * columns + column, total.to(y_ptr.dtype.element_ty), mask=inside)


def route(ids: torch.Tensor, share: torch.Tensor, experts: int, tokens: int) -> Routing:
    """ids int64 [T, k], each in [0, `experts`), share float [T, k] -> tiles of at most `tokens` slots; T > 0."""
    ids, slots = ids.contiguous(), ids.numel()
    count = slots // tokens + experts
    order = torch.empty(slots, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((min(count, slots), 4), dtype=torch.int32, device=ids.device)
    block = _FEW if slots <= _MANY else _MANY
    _route[(experts,)](
        ids, order, tiles, slots, DENSE=slots <= count, BLOCK_M=tokens, BLOCK=block, TILES=_TILES,
        num_warps=4 if block == _FEW else 8, **ahead(ids),
    )  # fmt: skip
    return Routing(order, tiles, share.contiguous(), ids.shape[1], tokens)


def grouped(
    x: torch.Tensor | Rounded,
    weight: torch.Tensor | QuantWeight | EightBitWeight,
    bias: torch.Tensor | None,
    routing: Routing,
    rows: int,
    gather: bool,
    epilogue: Epilogue,
    cut: Cut,
) -> torch.Tensor:
    """Rows of x, each times the weight of its slot's expert: [slots, rows] of x's dtype.

    Args:
        x: contiguous; [T, K] with `gather`, else [slots, K] in the order of the routing. Rounded for such a weight.
        weight: [E, rows, K], or [E, 2 rows, K] for a gated epilogue; quantized with the experts' rows joined.
        bias: [E, rows or 2 rows].
        routing: with `cut.tokens` per tile.
        rows: outputs per slot.
        gather: the result is in the routing's order; else in that of the slots.
        epilogue: what becomes of the sums.
        cut: how the work is cut; float32 sums of one cut do not depend on other slots.
    """
    codes_x = x.codes if isinstance(x, Rounded) else x
    (x_rows, columns), slots = codes_x.shape, routing.order.shape[0]
    y = torch.empty((slots, rows), dtype=x.dtype, device=codes_x.device)
    tiles_n = triton.cdiv(rows * (2 if epilogue.gated else 1), cut.rows)
    numbers, sizes, switches = _operand(weight, y)
    limits = limits_of(y.device)
    quantized = isinstance(weight, QuantWeight)
    step = limits.columns(cut.rows, cut.columns, codes_x.itemsize) if quantized else cut.columns
    stages = limits.stages(cut.stages, int(step * (cut.rows * _width(weight) + cut.tokens * codes_x.itemsize)))
    _grouped[(tiles_n * routing.tiles.shape[0],)](
        codes_x, x.scales if isinstance(x, Rounded) else y, *numbers, y if bias is None else bias, routing.share,
        routing.order, routing.tiles, y, rows, columns, x_rows, routing.top_k, tiles_n, *sizes,
        0.0 if epilogue.limit is None else float(epilogue.limit), float(epilogue.offset), **switches,
        GATED=epilogue.gated, INTERLEAVED=epilogue.interleaved,
        KIND=0 if epilogue.kind is None else KINDS[epilogue.kind].value, ACTIVATE=epilogue.kind is not None,
        LIMIT=epilogue.limit is not None, BIAS=bias is not None, EARLY=epilogue.early, LATE=epilogue.late,
        REPEAT=repeats(routing.tokens, cut.warps * limits.wave), GATHER=gather, EVEN=columns % step == 0,
        BLOCK_N=cut.rows, BLOCK_M=routing.tokens, BLOCK_K=step, STAGES=stages, num_warps=cut.warps,
        **ahead(y),
    )  # fmt: skip
    return y


def _width(weight: torch.Tensor | QuantWeight | EightBitWeight) -> float:
    """Bytes of one of its numbers."""
    if isinstance(weight, torch.Tensor):
        return weight.itemsize
    return 0.5 if isinstance(weight, QuantWeight) and not weight.bytes else 1.0


def _operand(
    weight: torch.Tensor | QuantWeight | EightBitWeight, none: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int, int, int], dict[str, Any]]:
    """Tensors, sizes and constants that tell a weight to `_grouped`; `none` stands for tensors that are not there."""
    switches: dict[str, Any] = dict.fromkeys(
        ("QUANT", "BYTES", "TABLE", "FLOATS", "SIGNED", "OFFSET", "EIGHT", "INTEGER"), False
    )
    switches |= {"GROUP": 0, "X_GROUP": 0, "GROUP_ROWS": 1}
    if isinstance(weight, QuantWeight):
        planes, stride, _ = weight.values.shape
        parts = (weight.values, weight.scales, weight.offsets, weight.book)
        return parts, (planes, weight.scales.shape[0], stride), switches | {"QUANT": True} | weight.switches
    if isinstance(weight, EightBitWeight):
        sizes = (0, 0, weight.scales.shape[1])
        return (weight.values, weight.scales, none, none), sizes, switches | {"EIGHT": True} | weight.switches
    return (weight, none, none, none), (0, 0, 0), switches


def combine(parts: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T * k, H] -> [T, H]: the sum over a token's slots, in float32."""
    if top_k == 1:
        return parts
    tokens, columns = parts.shape[0] // top_k, parts.shape[1]
    y = torch.empty((tokens, columns), dtype=parts.dtype, device=parts.device)
    _combine[(tokens, triton.cdiv(columns, _COLUMNS))](parts, y, columns, TOP_K=top_k, BLOCK=_COLUMNS, **ahead(parts))
    return y
