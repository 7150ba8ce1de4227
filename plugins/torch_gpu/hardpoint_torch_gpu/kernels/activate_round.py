"""A gated activation and the rounding of its result for the next product, in one pass over both halves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_platforms.quant import Codes, Rounding
from hardpoint_torch_gpu.kernels.activation import KINDS, activated
from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.round_input import Rounded, rounded

#: Columns per scale that a program holds in registers.
MOST = 16384
#: Numbers per program where groups are short.
_FEW = 2048


@triton.jit(do_not_specialize=["rows"])
def _activate_round(
    x_ptr, codes_ptr, scales_ptr, rows, groups, size, limit, offset, KIND: tl.constexpr, LIMIT: tl.constexpr,
    INTEGER: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """x as [rows, 2, groups, size]: the gate, then what it gates. A row here is a group of one of these."""
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.arange(0, BLOCK)
    token, group = row // groups, row % groups
    gate_at = (token.to(tl.int64) * 2 * groups + group) * size
    there = (row < rows)[:, None] & (column < size)[None, :]
    after_others(AHEAD)
    start = x_ptr + gate_at[:, None] + column[None, :]
    gate = tl.load(start, mask=there, other=0.0).to(tl.float32)
    up = tl.load(start + groups * size, mask=there, other=0.0).to(tl.float32)
    if LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    # Rounded to the activations' dtype first, as where the two are apart.
    y = (activated(gate, KIND) * (up + offset)).to(x_ptr.dtype.element_ty).to(tl.float32)
    y = tl.where(there, y, 0.0)
    codes, scale = rounded(y, INTEGER)
    tl.store(scales_ptr + group * (rows // groups) + token, scale, mask=row < rows)
    codes = codes.to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row.to(tl.int64)[:, None] * size + column[None, :], codes, mask=there)


def activate_round(x: torch.Tensor, kind: str, limit: float | None, offset: float, rounding: Rounding) -> Rounded:
    """x [M, 2F], contiguous, gate first -> F numbers per row as `round_rows` makes them of the gated activation."""
    tokens, inner = x.shape[0], x.shape[1] // 2
    integers, size = rounding.codes is Codes.INT8, rounding.group or inner
    groups = inner // size
    codes = torch.empty((tokens, inner), dtype=torch.int8 if integers else torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((groups, tokens), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    height = max(min(_FEW // block, 16), 1)
    if tokens:
        _activate_round[(triton.cdiv(tokens * groups, height),)](
            x, codes, scales, tokens * groups, groups, size, 0.0 if limit is None else limit, offset,
            KIND=KINDS[kind].value, LIMIT=limit is not None, INTEGER=integers, HEIGHT=height, BLOCK=block,
            num_warps=min(max(height * block // 512, 1), 16), **ahead(x),
        )  # fmt: skip
    return Rounded(codes, scales, x.dtype)
