"""y = x w^T on tensor cores that multiply 8-bit numbers: w as it lies in the file, x rounded before.

No number is converted on the way, so that the same kernel serves one row of x, where memory is the limit, and many. w
is the left operand, as in `quant_gemm`: a program makes [BLOCK_N, BLOCK_M] of y^T.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from hardpoint_platforms.quant import Rounding
from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.quant_codes import finish
from hardpoint_torch_gpu.kernels.round_input import Rounded, round_rows
from hardpoint_torch_gpu.kernels.rows import read_rows
from hardpoint_torch_gpu.limits import limits_of

#: Fewest rows of w per tile that shares its columns among programs.
LEAST_ROWS = 16


@dataclass(frozen=True)
class EightBitCut:
    """How a product is cut.

    Attributes:
        rows: of w per program (BLOCK_N).
        tokens: of x per program (BLOCK_M).
        columns: per step; scales of groups are applied once per step.
        splits: programs that share the columns of one tile; 1 where several tiles are needed for x's rows.
        warps, stages: of a program.
    """

    rows: int
    tokens: int
    columns: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True, eq=False)
class EightBitWeight:
    """A weight [rows, columns] whose products are of 8-bit numbers.

    Attributes:
        values: int8, float8_e4m3fn or float8_e4m3fnuz [rows, columns].
        scales: float32 [groups, ceil(rows / group_rows)].
        locks: int32 [ceil(rows / LEAST_ROWS)], 0.
        group: columns per scale, 0 for all.
        group_rows: rows per scale.
        rounding: of x.
    """

    values: torch.Tensor
    scales: torch.Tensor
    locks: torch.Tensor
    group: int
    group_rows: int
    rounding: Rounding

    @property
    def rows(self) -> int:
        """Of the logical weight."""
        return self.values.shape[0]

    @property
    def whole(self) -> bool:
        """One scale per row of w and of x: the sums are scaled, not their parts."""
        return not (self.group or self.rounding.group)

    def rounded(self, x: torch.Tensor) -> Rounded:
        """x float [M, columns], contiguous, on the grid that its rounding asks for."""
        return self.alike(round_rows(x, self.rounding))

    def alike(self, rounded: Rounded) -> Rounded:
        """A rounded input in the kind of this weight's numbers.

        For weights of e4m3fnuz the codes are read as that: numbers half as large, for which the scales make up.
        """
        if self.values.dtype is not torch.float8_e4m3fnuz:
            return rounded
        return replace(rounded, codes=rounded.codes.view(torch.float8_e4m3fnuz))

    @property
    def switches(self) -> dict[str, Any]:
        """Constants of each kernel."""
        return {
            "INTEGER": self.values.dtype is torch.int8, "GROUP": self.group, "X_GROUP": self.rounding.group,
            "GROUP_ROWS": self.group_rows,
        }  # fmt: skip


@triton.jit
def empty_sums(BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, INTEGER: tl.constexpr, WHOLE: tl.constexpr):
    """Sums of `added`: of integers as long as no scale has touched them."""
    if INTEGER and WHOLE:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    else:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    return sums


@triton.jit
def scaled(
    sums, scales_ptr, x_scales_ptr, row, token, first, stride, x_stride, GROUP: tl.constexpr, X_GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr, UNIFORM: tl.constexpr, REPEAT: tl.constexpr,
):  # fmt: skip
    """Sums [R, T] times the scales of the columns from `first` on. UNIFORM: all rows have that of the scalar `row`.

    REPEAT: reads of each scale of x. With fewer reads than threads the compiler has each thread read all scales that
    its sums need, up to 32; with as many it reads them once for all threads.
    """
    w_at = row // GROUP_ROWS
    x_at = token
    if GROUP:
        w_at = w_at + first // GROUP * stride
    if X_GROUP:
        x_at = x_at + first // X_GROUP * x_stride
    w_scale = tl.load(scales_ptr + w_at)
    if REPEAT > 1:
        x_scale = tl.max(tl.load(x_scales_ptr + x_at[:, None] + tl.zeros((1, REPEAT), tl.int32)), 1)
    else:
        x_scale = tl.load(x_scales_ptr + x_at)
    if UNIFORM:
        result = sums.to(tl.float32) * (x_scale * w_scale)[None, :]
    else:
        result = sums.to(tl.float32) * x_scale[None, :] * w_scale[:, None]
    return result


@triton.jit
def added(
    sums, w, x, scales_ptr, x_scales_ptr, row, token, first, stride, x_stride, GROUP: tl.constexpr,
    X_GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, UNIFORM: tl.constexpr, REPEAT: tl.constexpr,
):  # fmt: skip
    """Sums with the products of one step, w [R, K] and x [K, T], in them.

    Tensor cores of some GPUs keep few bits of a sum of 8-bit floats: after each step it is added up in float32.
    """
    if GROUP or X_GROUP:
        here = tl.dot(w, x)
        sums += scaled(
            here, scales_ptr, x_scales_ptr, row, token, first, stride, x_stride, GROUP, X_GROUP, GROUP_ROWS, UNIFORM,
            REPEAT,
        )  # fmt: skip
    else:
        sums = tl.dot(w, x, sums, max_num_imprecise_acc=w.shape[1], out_dtype=sums.dtype)
    return sums


@triton.jit(do_not_specialize=["tokens", "tiles_m", "steps"])
def _eight_bit_dot(
    values_ptr, scales_ptr, x_ptr, x_scales_ptr, bias_ptr, y_ptr, parts_ptr, locks_ptr,
    rows, columns, tokens, stride, tiles_m, steps,
    INTEGER: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, SHARED: tl.constexpr, UNIFORM: tl.constexpr,
    REPEAT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = GROUP == 0 and X_GROUP == 0
    tile, split = tl.program_id(0) // tiles_m, tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, token = tl.minimum(n, rows - 1), tl.minimum(m, tokens - 1)
    scale_row = tile * BLOCK_N if UNIFORM else row
    w_start = values_ptr + row.to(tl.int64)[:, None] * columns
    there, x_start = (m < tokens)[None, :], x_ptr + token.to(tl.int64)[None, :] * columns
    total = empty_sums(BLOCK_N, BLOCK_M, INTEGER, WHOLE)
    last = tl.minimum((split + 1) * steps, tl.cdiv(columns, BLOCK_K))
    after_others(AHEAD)
    for step in tl.range(split * steps, last, num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = read_rows(w_start, k[None, :], True, columns, EVEN, True)
        x = read_rows(x_start, k[:, None], there, columns, EVEN, FULL)
        total = added(
            total, w, x, scales_ptr, x_scales_ptr, scale_row, token, step * BLOCK_K, stride, tokens,
            GROUP, X_GROUP, GROUP_ROWS, UNIFORM, REPEAT,
        )  # fmt: skip
    if WHOLE:
        sums = scaled(total, scales_ptr, x_scales_ptr, scale_row, token, 0, 0, 0, 0, 0, GROUP_ROWS, UNIFORM, 1)
    else:
        sums = total
    if BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)[:, None]
    else:
        bias = 0.0
    y = y_ptr + m.to(tl.int64)[None, :] * rows + n[:, None]
    mask = (n < rows)[:, None] & (m < tokens)[None, :]
    area = BLOCK_N * BLOCK_M
    parts = parts_ptr + tile * area + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    finish(sums, bias, y, mask, parts, tl.num_programs(0) * area, locks_ptr + tile, split, tl.num_programs(1), SHARED)


def repeats(tokens: int, threads: int) -> int:
    """REPEAT for a tile of so many rows of x in a program of so many threads."""
    return max(threads // tokens, 1)


def eight_bit_dot(x: Rounded, weight: EightBitWeight, bias: torch.Tensor | None, cut: EightBitCut) -> torch.Tensor:
    """x [M, K], M > 0 -> [M, rows] of the dtype that x had. Sums of whole rows of integers are exact, others float32.

    Only where x fits in one tile are `cut.splits` made; of the stages there are as many as fit. The columns of a step
    divide the columns per scale.
    """
    (tokens, columns), rows = x.codes.shape, weight.rows
    y = torch.empty((tokens, rows), dtype=x.dtype, device=x.codes.device)
    tiles_n, tiles_m = triton.cdiv(rows, cut.rows), triton.cdiv(tokens, cut.tokens)
    limits = limits_of(y.device)
    stages = limits.stages(cut.stages, (cut.rows + cut.tokens) * cut.columns)
    total = triton.cdiv(columns, cut.columns)
    steps = triton.cdiv(total, cut.splits if tiles_m == 1 else 1)
    splits = triton.cdiv(total, steps)
    parts = y
    if splits > 1:
        parts = torch.empty(splits * tiles_n * cut.rows * cut.tokens, dtype=torch.float32, device=y.device)
    _eight_bit_dot[(tiles_n * tiles_m, splits)](
        weight.values, weight.scales, x.codes, x.scales, y if bias is None else bias, y, parts, weight.locks,
        rows, columns, tokens, weight.scales.shape[1], tiles_m, steps,
        **weight.switches, BIAS=bias is not None, EVEN=columns % cut.columns == 0, FULL=tokens % cut.tokens == 0,
        SHARED=splits > 1, UNIFORM=weight.group_rows % cut.rows == 0,
        REPEAT=repeats(cut.tokens, cut.warps * limits.wave), BLOCK_N=cut.rows, BLOCK_M=cut.tokens,
        BLOCK_K=cut.columns, STAGES=stages, num_warps=cut.warps, **ahead(y),
    )  # fmt: skip
    return y
