"""y = x w^T for one row of x: every weight is read once, at the speed of memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead


@triton.jit
def _block(start, column, row, rows, columns):
    """Weights of some rows and columns; each is read once, so that caches need not keep it."""
    inside = (row[:, None] < rows) & (column < columns)[None, :]
    return tl.load(start + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _gemv(
    x_ptr, w_ptr, bias_ptr, y_ptr, rows, columns, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    start = w_ptr + row[:, None].to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    w = _block(start, column, row, rows, columns)
    after_others(AHEAD)
    for _ in range(0, columns, BLOCK):
        x = tl.load(x_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        column += BLOCK
        now, w = w, _block(start, column, row, rows, columns)
        total += now.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < rows)


def _shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows of w per program, columns per step, warps: of 22 the fastest on an H200 for the layers of Llama 8B."""
    if columns > 8192:
        return 4, 1024, 4
    if rows > 16384:
        return 2, 2048, 4
    return (8, 512, 4) if rows > 4096 else (8, 1024, 4)


def gemv(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [1, K], w [N, K], bias [N] -> [1, N] of `dtype`."""
    y = torch.empty((1, w.shape[0]), dtype=dtype, device=x.device)
    rows, block, warps = _shape(*w.shape)
    _gemv[(triton.cdiv(w.shape[0], rows),)](
        x, w, w if bias is None else bias, y, w.shape[0], w.shape[1],
        BIAS=bias is not None, ROWS=rows, BLOCK=block, num_warps=warps, **ahead(x),
    )  # fmt: skip
    return y
