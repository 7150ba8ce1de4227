"""A residual addition, the norm of the sum, and its rounding for the next product: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_platforms.quant import Codes, Rounding
from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.norm import LONGEST, normed, summed, switches, warps
from hardpoint_torch_gpu.kernels.round_input import Rounded, rounded


def refusal(columns: int, rounding: Rounding) -> str:
    """Why rows of so many columns are not normed and rounded in one pass; "" where they are."""
    if columns > LONGEST:
        return f"rows of {columns}, the norm holds up to {LONGEST}"
    size = rounding.group or columns
    if size < columns and size & (size - 1):
        return f"a scale per {size} columns, the norm rounds powers of two of them, or whole rows"
    return ""


@triton.jit(do_not_specialize=["rows"])
def _norm_round(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, codes_ptr, scales_ptr, sum_ptr, rows, size, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, PLUS_ONE: tl.constexpr,
    INTEGER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """GROUP: columns per scale, 0 for all."""
    SIZE: tl.constexpr = GROUP if GROUP else BLOCK
    # Threads hold as many neighbours as without the codes: 16 bytes of x. With 16 codes sums would have another order.
    NEIGHBOURS: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    w = 0.0
    if WEIGHT:
        w = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    after_others(AHEAD)
    x = summed(x_ptr, residual_ptr, sum_ptr, row * size + column, inside)
    y = normed(x, w, bias_ptr, column, inside, size, eps, WEIGHT, BIAS, CENTER, MEAN, PLUS_ONE)
    # Rounded to the activations' dtype first, as where the two are apart.
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    codes, scale = rounded(tl.reshape(y, (BLOCK // SIZE, SIZE)), INTEGER)
    group = tl.arange(0, BLOCK // SIZE)
    tl.store(scales_ptr + group.to(tl.int64) * rows + row, scale, mask=group * SIZE < size)
    codes = tl.reshape(codes, (BLOCK,)).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * size + tl.max_contiguous(column, NEIGHBOURS), codes, mask=inside)


def norm_round(
    x: torch.Tensor,
    residual: torch.Tensor,
    kind: str,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rounding: Rounding,
) -> tuple[Rounded, torch.Tensor]:
    """x and residual [..., H], weight and bias [H] -> (what `round_rows` makes of the M rows of their sum's norm, the
    sum). Only where nothing speaks against it (`refusal`)."""
    columns = x.shape[-1]
    x, residual = x.contiguous(), residual.contiguous()
    rows, size = x.numel() // columns, rounding.group or columns
    integers, block = rounding.codes is Codes.INT8, triton.next_power_of_2(columns)
    total = torch.empty_like(x)
    codes = torch.empty((rows, columns), dtype=torch.int8 if integers else torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((columns // size, rows), dtype=torch.float32, device=x.device)
    if rows:
        _norm_round[(rows,)](
            x, residual, x if weight is None else weight, x if bias is None else bias, codes, scales, total,
            rows, columns, eps, **switches(kind, weight, bias), INTEGER=integers,
            GROUP=size if size < columns else 0, BLOCK=block, num_warps=warps(block), **ahead(x),
        )  # fmt: skip
    return Rounded(codes, scales, x.dtype), total
