"""y = x w^T for a quantized w: tensor cores over codes made numbers in registers; and a plain copy of w's rows.

w is the left operand, as the one that may come from registers: a program makes [BLOCK_N, BLOCK_M] of y^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.quant_codes import codes, finish
from hardpoint_torch_gpu.kernels.rows import read_rows
from hardpoint_torch_gpu.limits import limits_of

#: Rows of a packed weight are padded to a multiple of this: no tile is higher.
ROWS = 128
#: Rows of x from which a tile is filled up with zeros: that costs 2 microseconds, and asking for each row whether it is
#: there a third of the product.
_WHOLE = 128


@dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    Attributes:
        rows: of w per program (BLOCK_N).
        tokens: of x per program (BLOCK_M).
        columns: per step, a multiple of `piece`.
        piece: columns per dot, a power of two from 32 on. With `late` it divides the group.
        late: scale the sums over a group: nothing is rounded. Else each weight is made, in the activations' dtype.
        splits: programs that share the columns of one tile; 1 where several tiles are needed for x's rows.
        warps, stages: of a program.
    """

    rows: int
    tokens: int
    columns: int
    piece: int
    late: bool
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True, eq=False)
class QuantWeight:
    """A weight [rows, columns] in the layout of `quant_codes`; the padded rows are a multiple of `ROWS`.

    Attributes:
        values: int32 [planes, padded rows, 4].
        scales, offsets: float [groups, padded rows]; offsets empty where absent.
        book: of the activations' dtype [16]; empty where codes are numbers, of one element where they are e2m1.
        locks: int32 [padded rows / 16], 0.
        rows, columns: of the logical weight.
        group: columns per scale, a power of two from 16 on.
        bytes: codes of 8 bits, else of 4.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    book: torch.Tensor
    locks: torch.Tensor
    rows: int
    columns: int
    group: int
    bytes: bool

    @property
    def switches(self) -> dict[str, Any]:
        """Constants of each kernel. SIGNED: without offsets, the integer of a 4-bit weight 0 is 8."""
        table, floats, offset = self.book.numel() == 16, self.book.numel() == 1, self.offsets.numel() > 0
        signed = not (self.bytes or table or floats or offset)
        return {
            "BYTES": self.bytes, "TABLE": table, "FLOATS": floats, "SIGNED": signed, "OFFSET": offset,
            "GROUP": self.group,
        }  # fmt: skip


@triton.jit
def decoded(
    q, scales_ptr, offsets_ptr, column, groups, stride, n, dtype: tl.constexpr, OFFSET: tl.constexpr,
    GROUP: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Codes [R, P] of the columns from `column` on to weights of `dtype`."""
    WIDTH: tl.constexpr = q.shape[1]
    HERE: tl.constexpr = WIDTH // GROUP if WIDTH > GROUP else 1
    inner: tl.constexpr = dtype if NARROW else tl.float32
    group = tl.minimum(column // GROUP + tl.arange(0, HERE), groups - 1)
    at = group[None, :] * stride + n[:, None]
    w = q.to(inner).reshape(q.shape[0], HERE, WIDTH // HERE)
    w = w * tl.load(scales_ptr + at).to(inner)[:, :, None]
    if OFFSET:
        w = w + tl.load(offsets_ptr + at).to(inner)[:, :, None]
    return w.reshape(q.shape[0], WIDTH).to(dtype)


@triton.jit
def register_dot(w, x, sums):
    """sums + w x, sums float32 [N, M], where a loop makes w anew in registers at each of its steps.

    Hopper's tensor cores read such registers while the program goes on. With sums that are only summed further Triton
    3.6 lets products run on into the next step, which overwrites what they read; any use of the sums makes it wait.
    """
    return tl.dot(w, x, sums, input_precision="ieee").to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)


@triton.jit
def read_words(values_ptr, first, planes, stride, n, WIDTH: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """Words [R, WIDTH / C, 4] of the columns from `first` on; behind the last plane that plane again."""
    plane = first // C + tl.arange(0, WIDTH // C)
    if not EVEN:
        plane = tl.minimum(plane, planes - 1)
    start = values_ptr + (plane.to(tl.int64)[None, :] * stride + n[:, None]) * 4
    return tl.load(start[:, :, None] + tl.arange(0, 4)[None, None, :])


@triton.jit(do_not_specialize=["tokens", "tiles_m"])
def _quant_dot(
    values_ptr, scales_ptr, offsets_ptr, book_ptr, x_ptr, bias_ptr, y_ptr, parts_ptr, locks_ptr,
    rows, columns, tokens, planes, groups, stride, tiles_m, steps,
    BYTES: tl.constexpr, TABLE: tl.constexpr, FLOATS: tl.constexpr, SIGNED: tl.constexpr, OFFSET: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, LATE: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    C: tl.constexpr = 16 if BYTES else 32
    tile, split = tl.program_id(0) // tiles_m, tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    there, x_start = (token < tokens)[None, :], x_ptr + token.to(tl.int64)[None, :] * columns
    ones = tl.full((BLOCK_N, PIECE), 1.0, dtype)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    after_others(AHEAD)
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
        for part in tl.static_range(BLOCK_K // PIECE):
            first = step * BLOCK_K + part * PIECE
            k = first + tl.arange(0, PIECE)
            x = read_rows(x_start, k[:, None], there, columns, EVEN, FULL)
            w = read_words(values_ptr, first, planes, stride, n, PIECE, C, EVEN)
            q = codes(w, book_ptr, dtype, BYTES, TABLE, FLOATS, SIGNED)
            if LATE:
                at = tl.minimum(first // GROUP, groups - 1) * stride + n
                scale = tl.load(scales_ptr + at).to(tl.float32)
                total += tl.dot(q, x, input_precision="ieee") * scale[:, None]
                if OFFSET:
                    # The sums of x, in the layout of `total`, from tensor cores that have the time.
                    offset = tl.load(offsets_ptr + at).to(tl.float32)
                    total += tl.dot(ones, x, input_precision="ieee") * offset[:, None]
            else:
                weight = decoded(q, scales_ptr, offsets_ptr, first, groups, stride, n, dtype, OFFSET, GROUP, True)
                total = register_dot(weight, x, total)
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    else:
        bias = 0.0
    y = y_ptr + token.to(tl.int64)[None, :] * rows + n[:, None]
    mask = (n < rows)[:, None] & (token < tokens)[None, :]
    area = BLOCK_N * BLOCK_M
    parts = parts_ptr + tile * area + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    finish(total, bias, y, mask, parts, tl.num_programs(0) * area, locks_ptr + tile, split, tl.num_programs(1), SHARED)


@triton.jit(do_not_specialize=["count"])
def _dequantize(
    values_ptr, scales_ptr, offsets_ptr, book_ptr, ids_ptr, y_ptr, columns, planes, groups, stride, begin, count,
    factor, BYTES: tl.constexpr, TABLE: tl.constexpr, FLOATS: tl.constexpr, SIGNED: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, IDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 16 if BYTES else 32
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    after_others(AHEAD)
    if IDS:
        n = tl.load(ids_ptr + row, mask=row < count, other=0)
    else:
        n = begin + row
    first = tl.program_id(0) * BLOCK_K
    w = read_words(values_ptr, first, planes, stride, n, BLOCK_K, C, False)
    q = codes(w, book_ptr, dtype, BYTES, TABLE, FLOATS, SIGNED)
    weight = decoded(q, scales_ptr, offsets_ptr, first, groups, stride, n, tl.float32, OFFSET, GROUP, False)
    k = first + tl.arange(0, BLOCK_K)
    mask = (row < count)[:, None] & (k < columns)[None, :]
    y = y_ptr + row.to(tl.int64)[:, None] * columns + k[None, :]
    tl.store(y, (weight * factor).to(dtype), mask=mask)


def dequantize(weight: QuantWeight, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [begin, end) as `dtype` [end - begin, columns]; `begin` a multiple of `ROWS`."""
    y = torch.empty((end - begin, weight.columns), dtype=dtype, device=weight.values.device)
    return _rows(weight, y, y, begin, 1.0, False)


def gather(weight: QuantWeight, ids: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` int64 [T], times `factor`: `dtype` [T, columns]."""
    y = torch.empty((ids.numel(), weight.columns), dtype=dtype, device=ids.device)
    return _rows(weight, ids.contiguous(), y, 0, factor, True) if ids.numel() else y


def _rows(
    weight: QuantWeight, ids: torch.Tensor, y: torch.Tensor, begin: int, factor: float, chosen: bool
) -> torch.Tensor:
    planes, stride, _ = weight.values.shape
    height = 4 if chosen else 32
    _dequantize[(triton.cdiv(weight.columns, 128), triton.cdiv(y.shape[0], height))](
        weight.values, weight.scales, weight.offsets, weight.book, ids, y, weight.columns, planes,
        weight.scales.shape[0], stride, begin, y.shape[0], float(factor),
        **weight.switches, IDS=chosen, BLOCK_N=height, BLOCK_K=128, num_warps=1 if chosen else 4, **ahead(y),
    )  # fmt: skip
    return y


def quant_dot(
    x: torch.Tensor, weight: QuantWeight, bias: torch.Tensor | None, dtype: torch.dtype, tiles: Tiles
) -> torch.Tensor:
    """x [M, K], contiguous -> [M, rows] of `dtype`. The sums are float32, each row's the same whatever the others."""
    tokens, columns = x.shape
    y = torch.empty((tokens, weight.rows), dtype=dtype, device=x.device)
    if (short := -tokens % tiles.tokens) and tiles.tokens >= _WHOLE:
        x = F.pad(x, (0, 0, 0, short))
    planes, stride, _ = weight.values.shape
    tiles_n, tiles_m = triton.cdiv(weight.rows, tiles.rows), triton.cdiv(tokens, tiles.tokens)
    limits = limits_of(x.device)
    piece = limits.columns(tiles.rows, tiles.piece, x.itemsize)
    step = tiles.columns if piece == tiles.piece else piece
    read = tiles.rows if weight.bytes else tiles.rows // 2
    stages = limits.stages(tiles.stages, step * (read + tiles.tokens * x.itemsize))
    total = triton.cdiv(columns, step)
    steps = triton.cdiv(total, tiles.splits if tiles_m == 1 else 1)
    splits = triton.cdiv(total, steps)
    parts = y
    if splits > 1:
        parts = torch.empty(splits * tiles_n * tiles.rows * tiles.tokens, dtype=torch.float32, device=x.device)
    _quant_dot[(tiles_n * tiles_m, splits)](
        weight.values, weight.scales, weight.offsets, weight.book, x, y if bias is None else bias, y, parts,
        weight.locks, weight.rows, columns, tokens, planes, weight.scales.shape[0], stride, tiles_m, steps,
        **weight.switches, BIAS=bias is not None, EVEN=columns == splits * steps * step,
        FULL=len(x) % tiles.tokens == 0, LATE=tiles.late, SHARED=splits > 1, BLOCK_N=tiles.rows, BLOCK_M=tiles.tokens,
        BLOCK_K=step, PIECE=piece, STAGES=stages, num_warps=tiles.warps, **ahead(x),
    )  # fmt: skip
    return y
