"""Norms over the last dimension, alone and behind a residual addition: one program per row, sums in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead

#: Longest row: it is held in registers.
LONGEST = 1 << 15


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, size, heads, eps,
    ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, PER_HEAD: tl.constexpr,
    CENTER: tl.constexpr, MEAN: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    place = column
    if PER_HEAD:
        place = column + (row % heads).to(tl.int32) * size
    if WEIGHT:
        w = tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
    after_others(AHEAD)
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0)
    if ADD:
        # Rounded before it is normed, as the sum is what travels on.
        total = x.to(tl.float32) + tl.load(residual_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        x = total.to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + column, x, mask=inside)
    x = x.to(tl.float32)
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    square = tl.sum(x * x, 0)
    if MEAN:
        square = square / size
    y = x * (1.0 / tl.sqrt(square + eps))
    if WEIGHT:
        y = y * (w + 1.0 if PLUS_ONE else w)
    if BIAS:
        y = y + tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor,
    kind: str,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., H] -> (normed, x + residual or x itself). `weight` is [H] or [h, H] for x [..., h, H]."""
    size = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rows = x.numel() // size if size else 0
    if rows:
        block = triton.next_power_of_2(size)
        per_head = weight is not None and weight.dim() == 2
        _norm[(rows,)](
            x, x if residual is None else residual.contiguous(), x if weight is None else weight,
            x if bias is None else bias, out, total, size, x.shape[-2] if per_head else 1, eps,
            ADD=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None, PER_HEAD=per_head,
            CENTER=kind == "ln", MEAN=kind != "l2", PLUS_ONE=kind == "rms1p", BLOCK=block,
            num_warps=min(max(block // 256, 1), 16), **ahead(x),
        )  # fmt: skip
    return out, total
