"""The input of a product on 8-bit numbers: each row, or each group of a row's columns, rounded on a scale of its own.

Numbers are rounded by float32 arithmetic and only then converted: a number that the narrow type has is converted
exactly everywhere, whatever way of rounding a device's conversion knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_platforms.quant import Codes, Rounding
from hardpoint_torch_gpu.kernels.ahead import after_others, ahead

#: Columns that a program holds in registers; longer groups are read twice.
_HELD = 16384
#: Numbers per program where groups are short.
_FEW = 2048


@dataclass(frozen=True, eq=False)
class Rounded:
    """Rows as 8-bit numbers: x[m, k] is about codes[m, k] * scales[k // group, m].

    Attributes:
        codes: int8 or float8_e4m3fn [M, K].
        scales: float32 [groups, M].
        dtype: what x was.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


@triton.jit
def nearest(ratio, INTEGER: tl.constexpr):
    """The nearest int8, or float8 e4m3, still as float32; of two equally near the even one.

    Adding 1.5 * 2**23 units leaves no bit below a unit: of 1, or of what e4m3 has at that size (3 bits, 2**-9 or more).
    """
    if INTEGER:
        above = 12582912.0
        limit = 127.0
    else:
        power = (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        above = tl.maximum(power, 0.015625) * 1572864.0
        limit = 448.0
    return tl.minimum(tl.maximum((ratio + above) - above, -limit), limit)


@triton.jit
def largest(x):
    """Largest magnitude of each row, as the bits of a float32: in that order, infinity and NaN come last."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scale_of(top, INTEGER: tl.constexpr):
    """The scale of each row by the bits of its largest magnitude; what to divide by: no zero."""
    size: tl.constexpr = top.shape[0]
    scale = tl.div_rn(top.to(tl.float32, bitcast=True), tl.full((size,), 127.0 if INTEGER else 448.0, tl.float32))
    return scale, tl.where(scale > 0, scale, 1.0)


@triton.jit
def rounded(x, INTEGER: tl.constexpr):
    """Rows x [R, C] that a program holds whole, as codes, still float32, and their scales."""
    scale, divisor = scale_of(largest(x), INTEGER)
    return nearest(tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape)), INTEGER), scale


@triton.jit(do_not_specialize=["rows"])
def _round(
    x_ptr, codes_ptr, scales_ptr, rows, groups, size,
    INTEGER: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """x as [rows, size], `groups` of these rows to a row of the product."""
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.arange(0, BLOCK)
    start = row.to(tl.int64)[:, None] * size + column[None, :]
    there = (row < rows)[:, None]
    after_others(AHEAD)
    x = tl.load(x_ptr + start, mask=there & (column < size)[None, :], other=0.0).to(tl.float32)
    top = largest(x)
    if not ONCE:
        for first in range(BLOCK, size, BLOCK):
            inside = there & (first + column < size)[None, :]
            top = tl.maximum(top, largest(tl.load(x_ptr + start + first, mask=inside, other=0.0).to(tl.float32)))
    scale, divisor = scale_of(top, INTEGER)
    divisor = tl.broadcast_to(divisor[:, None], (HEIGHT, BLOCK))
    tl.store(scales_ptr + row % groups * (rows // groups) + row // groups, scale, mask=row < rows)
    code = codes_ptr.dtype.element_ty
    if ONCE:
        y = nearest(tl.div_rn(x, divisor), INTEGER).to(code)
        tl.store(codes_ptr + start, y, mask=there & (column < size)[None, :])
    else:
        for first in range(0, size, BLOCK):
            inside = there & (first + column < size)[None, :]
            x = tl.load(x_ptr + start + first, mask=inside, other=0.0).to(tl.float32)
            tl.store(codes_ptr + start + first, nearest(tl.div_rn(x, divisor), INTEGER).to(code), mask=inside)


def round_rows(x: torch.Tensor, rounding: Rounding) -> Rounded:
    """x float [M, K], contiguous. To the bit as `Rounding` says; a group with a NaN or an infinity has NaN or that
    for a scale. Scales too small for float32 to have 24 bits of them (below 2**-126) may end in other codes."""
    rows, columns = x.shape
    integers, size = rounding.codes is Codes.INT8, rounding.group or columns
    groups = columns // size
    codes = torch.empty(x.shape, dtype=torch.int8 if integers else torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(size), _HELD)
    height = max(min(_FEW // block, 16), 1)
    if rows:
        _round[(triton.cdiv(rows * groups, height),)](
            x, codes, scales, rows * groups, groups, size, INTEGER=integers, HEIGHT=height, BLOCK=block,
            ONCE=size <= block, num_warps=min(max(height * block // 512, 1), 16), **ahead(x),
        )  # fmt: skip
    return Rounded(codes, scales, x.dtype)
