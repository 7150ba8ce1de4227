"""y = x w^T for one row of x: every weight is read once, at the speed of memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _gemv(x_ptr, w_ptr, bias_ptr, y_ptr, rows, columns, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    start = w_ptr + row[:, None].to(tl.int64) * columns
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(
            start + column[None, :], mask=(row[:, None] < rows) & inside[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        total += w.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < rows)


def gemv(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, rows: int, block: int, warps: int
) -> torch.Tensor:
    """x [1, K], w [N, K], bias [N] -> [1, N] of `dtype`. rows, block: of w per program and step; warps per program."""
    y = torch.empty((1, w.shape[0]), dtype=dtype, device=x.device)
    _gemv[(triton.cdiv(w.shape[0], rows),)](
        x, w, w if bias is None else bias, y, w.shape[0], w.shape[1],
        BIAS=bias is not None, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y
