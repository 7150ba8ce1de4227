"""y = x w^T for a few rows of x: every weight is read once, at the speed of memory, and multiplied by tensor cores.

w is the left operand: a program makes [BLOCK_N, BLOCK_M] of y^T, or its share of the sums where the columns are split.
One by one the library's products are about as fast, but they start only when the kernel before them has ended.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.quant_codes import finish
from hardpoint_torch_gpu.kernels.rows import read_rows
from hardpoint_torch_gpu.limits import Limits, limits_of

#: Most rows of x.
MOST = 64
#: Columns of a step, and steps that are loaded ahead.
_COLUMNS, _STAGES = 128, 4


@triton.jit(do_not_specialize=["tokens", "steps"])
def _skinny(
    x_ptr, w_ptr, bias_ptr, y_ptr, parts_ptr, locks_ptr, rows, columns, tokens, steps, BIAS: tl.constexpr,
    SHARED: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    n, token, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    begin = split * steps * BLOCK_K
    left = columns - begin
    w_start = w_ptr + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * columns + begin
    there, x_start = (token < tokens)[None, :], x_ptr + token[None, :] * columns + begin
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    after_others(AHEAD)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = step * BLOCK_K
        w = read_rows(w_start, (at + k)[None, :], True, left, EVEN, True)
        x = read_rows(x_start, (at + k)[:, None], there, left, EVEN, FULL)
        total = tl.dot(w, x, total, input_precision="ieee")
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    else:
        bias = 0.0
    y = y_ptr + token.to(tl.int64)[None, :] * rows + n[:, None]
    mask = (n < rows)[:, None] & (token < tokens)[None, :]
    area = BLOCK_N * BLOCK_M
    parts = parts_ptr + tile * area + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    finish(total, bias, y, mask, parts, tl.num_programs(0) * area, locks_ptr + tile, split, tl.num_programs(1), SHARED)


def _shape(rows: int, height: int, limits: Limits) -> tuple[int, int, int]:
    """Rows of w per program, warps, stages: of 9 shapes the fastest on an H200 for the layers of Llama 8B.

    Elsewhere as many steps are loaded ahead as shared memory holds; large tiles only where two are.
    """
    large = limits.stages(_STAGES, (128 + height) * _COLUMNS * 2)
    if rows > 16384 and height != 32 and large > 1:
        return 128, 8, large
    return 64, 4, limits.stages(_STAGES, (64 + height) * _COLUMNS * 2)


def skinny(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] of up to MOST rows, contiguous, w [N, K], bias [N] -> [M, N] of x's dtype, float16 or bfloat16."""
    (tokens, columns), rows = x.shape, w.shape[0]
    height = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    block_n, warps, stages = _shape(rows, height, limits_of(x.device))
    tiles, total = triton.cdiv(rows, block_n), triton.cdiv(columns, _COLUMNS)
    wanted = min(max(round(processors(x.device) / tiles), 1), max(total // 4, 1))
    steps = triton.cdiv(total, wanted)
    splits = triton.cdiv(total, steps)
    y = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    parts = y
    if splits > 1:
        parts = torch.empty(splits * tiles * block_n * height, dtype=torch.float32, device=x.device)
    _skinny[(tiles, splits)](
        x, w, w if bias is None else bias, y, parts, _locks(x.device), rows, columns, tokens, steps,
        BIAS=bias is not None, SHARED=splits > 1, EVEN=columns == splits * steps * _COLUMNS, FULL=tokens == height,
        BLOCK_N=block_n, BLOCK_M=height, BLOCK_K=_COLUMNS, STAGES=stages, num_warps=warps, **ahead(x),
    )  # fmt: skip
    return y


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _locks(device: torch.device) -> torch.Tensor:
    """int32 zeros, and zeros again after every launch. Products are split in few tiles, launched one after another."""
    return torch.zeros(4096, dtype=torch.int32, device=device)
