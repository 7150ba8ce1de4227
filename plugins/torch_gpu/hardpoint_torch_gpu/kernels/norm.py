"""Norms over the last dimension, alone and behind a residual addition: one program per row, sums in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead

#: Longest row: it is held in registers.
LONGEST = 1 << 15


@triton.jit
def summed(x_ptr, residual_ptr, sum_ptr, at, inside):
    """x + residual of a row, rounded before it is normed, as the sum is what travels on."""
    total = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = total.to(x_ptr.dtype.element_ty)
    tl.store(sum_ptr + at, total, mask=inside)
    return total


@triton.jit
def normed(
    x, w, bias_ptr, column, inside, size, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """The norm of a row, float32. x and w are 0 where not inside."""
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
    return y


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
    w = 0.0
    if WEIGHT:
        w = tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
    after_others(AHEAD)
    at = row * size + column
    if ADD:
        x = summed(x_ptr, residual_ptr, sum_ptr, at, inside)
    else:
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
    y = normed(x, w, bias_ptr, column, inside, size, eps, WEIGHT, BIAS, CENTER, MEAN, PLUS_ONE)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def switches(kind: str, weight: torch.Tensor | None, bias: torch.Tensor | None) -> dict[str, bool]:
    """Constants of `normed`."""
    return {
        "WEIGHT": weight is not None, "BIAS": bias is not None, "CENTER": kind == "ln", "MEAN": kind != "l2",
        "PLUS_ONE": kind == "rms1p",
    }  # fmt: skip


def warps(block: int) -> int:
    """Of a program that holds a row of so many numbers: the order of a sum is theirs."""
    return min(max(block // 256, 1), 16)


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
            ADD=residual is not None, PER_HEAD=per_head, **switches(kind, weight, bias), BLOCK=block,
            num_warps=warps(block), **ahead(x),
        )  # fmt: skip
    return out, total
