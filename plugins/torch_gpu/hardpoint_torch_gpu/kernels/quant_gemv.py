"""y = x w^T for one row of x and a quantized w: no tensor cores, float32 throughout.

An integer becomes a float by lying in the mantissa of a power of two, with that power subtracted once per word of x
and not once per weight: one shift for two 4-bit codes, one mask and one multiply-add for each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.quant_codes import finish
from hardpoint_torch_gpu.kernels.quant_gemm import QuantWeight


@triton.jit
def _halves(pair, BRAIN: tl.constexpr):
    """Two 16-bit floats in an int32 -> two float32."""
    if BRAIN:
        low = (pair << 16).to(tl.float32, bitcast=True)
        high = (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _field(w, p: tl.constexpr, BYTES: tl.constexpr):
    """Field p of each word as float32, plus 256 or, of 4 bits and p odd, 16. Bytes are unsigned here."""
    BYTE: tl.constexpr = p if BYTES else p // 2
    if BYTE < 2:
        v = w << (15 - 8 * BYTE)
    else:
        v = w >> (8 * BYTE - 15)
    if BYTES:
        q = (v & 0x007F8000) | 0x43800000
    elif p % 2 == 0:
        q = (v & 0x00078000) | 0x43800000
    else:
        q = (v & 0x00780000) | 0x41800000
    return q.to(tl.float32, bitcast=True)


@triton.jit
def _quant_gemv(
    values_ptr, scales_ptr, offsets_ptr, x_ptr, bias_ptr, y_ptr, parts_ptr, locks_ptr, rows, columns, planes, groups,
    stride, steps, BYTES: tl.constexpr, SIGNED: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, BRAIN: tl.constexpr, ROWS: tl.constexpr, PLANES: tl.constexpr,
    SHARED: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 16 if BYTES else 32
    FIELDS: tl.constexpr = C // 8
    ZERO: tl.constexpr = 8 if SIGNED else 0
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, 4)
    total = tl.zeros((PLANES, ROWS, 4), tl.float32)
    after_others(AHEAD)
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
        plane = step * PLANES + tl.arange(0, PLANES)
        column = plane[:, None] * C + 2 * t[None, :]
        if not EVEN:
            plane = tl.minimum(plane, planes - 1)
        start = values_ptr + (plane.to(tl.int64)[:, None] * stride + n[None, :]) * 4
        w = tl.load(start[:, :, None] + t[None, None, :], eviction_policy="evict_first")
        if BYTES:
            w = w ^ -2139062144
        found = tl.zeros((PLANES, ROWS, 4), tl.float32)
        above = tl.zeros((PLANES, 4), tl.float32)
        plain = tl.zeros((PLANES, 4), tl.float32)
        for i in tl.static_range(FIELDS):
            at = column + 8 * i
            if EVEN:
                pair = tl.load(x_ptr + at // 2)
            else:
                pair = tl.load(x_ptr + at // 2, mask=at < columns, other=0)
            low, high = _halves(pair, BRAIN)
            found += _field(w, i, BYTES) * low[:, None, :]
            found += _field(w, i + FIELDS, BYTES) * high[:, None, :]
            if BYTES:
                above += (low + high) * 384.0
            elif i % 2 == 0:
                above += (low + high) * (256.0 + ZERO)
            else:
                above += (low + high) * (16.0 + ZERO)
            if OFFSET:
                plain += low + high
        where = tl.minimum(plane * C // GROUP, groups - 1)[:, None] * stride + n[None, :]
        total += (found - above[:, None, :]) * tl.load(scales_ptr + where).to(tl.float32)[:, :, None]
        if OFFSET:
            total += plain[:, None, :] * tl.load(offsets_ptr + where).to(tl.float32)[:, :, None]
    y = tl.sum(tl.sum(total, 2), 0)
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < rows, other=0.0).to(tl.float32)
    else:
        bias = 0.0
    parts = parts_ptr + n
    finish(
        y,
        bias,
        y_ptr + n,
        n < rows,
        parts,
        tl.num_programs(0) * ROWS,
        locks_ptr + tile,
        split,
        tl.num_programs(1),
        SHARED,
    )


def takes(weight: QuantWeight, dtype: torch.dtype) -> bool:
    """Whether the kernel has this: codes that are numbers, groups of whole planes, 16-bit activations."""
    plane = 16 if weight.bytes else 32
    return not weight.book.numel() and weight.group % plane == 0 and dtype in (torch.bfloat16, torch.float16)


def quant_gemv(
    x: torch.Tensor, weight: QuantWeight, bias: torch.Tensor | None, dtype: torch.dtype,
    rows: int, planes: int, splits: int, warps: int, stages: int = 1,
) -> torch.Tensor:  # fmt: skip
    """x [1, K], contiguous -> [1, rows of w] of `dtype`.

    rows, planes: of w per program and step, `rows` a divisor of `quant_gemm.ROWS` from 16 on; splits: programs that
    share the columns of the same rows; warps, stages: of a program.
    """
    columns = x.shape[1]
    y = torch.empty((1, weight.rows), dtype=dtype, device=x.device)
    there, stride, _ = weight.values.shape
    tiles = triton.cdiv(weight.rows, rows)
    total = triton.cdiv(there, planes)
    steps = triton.cdiv(total, splits)
    splits = triton.cdiv(total, steps)
    parts = y if splits == 1 else torch.empty(splits * tiles * rows, dtype=torch.float32, device=x.device)
    switches = {name: value for name, value in weight.switches.items() if name not in ("TABLE", "FLOATS")}
    _quant_gemv[(tiles, splits)](
        weight.values, weight.scales, weight.offsets, x.view(torch.int32), y if bias is None else bias, y, parts,
        weight.locks, weight.rows, columns, there, weight.scales.shape[0], stride, steps,
        **switches, BIAS=bias is not None, EVEN=columns == splits * steps * planes * (16 if weight.bytes else 32),
        BRAIN=x.dtype is torch.bfloat16, SHARED=splits > 1, ROWS=rows, PLANES=planes, STAGES=stages,
        num_warps=warps, **ahead(x),
    )  # fmt: skip
    return y
