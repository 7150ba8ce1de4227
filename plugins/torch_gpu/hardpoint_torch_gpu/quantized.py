"""Quantized weights as the kernels take them: packed once at load, about as large as in the file."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import OpInstance, Packed
from hardpoint_platforms.quant import Packing, QuantTensor, pack_uint4, unpack_codes
from hardpoint_torch_gpu.kernels import quant_gemv
from hardpoint_torch_gpu.kernels.quant_gemm import ROWS, QuantWeight, Tiles, dequantize, quant_dot
from hardpoint_torch_gpu.kernels.skinny import processors

#: Tensors of a packed weight, before what else the op has.
PARTS = 5
#: Rows of x from which the weight is made plain first: then the library's product is worth that pass.
_MANY_TOKENS = 257
#: Most numbers of a weight made plain at a time.
_SCRATCH = 1 << 28
#: Columns per scale at most; longer groups repeat theirs.
_LONGEST_GROUP = 1024
#: How far a scale may be rounded: half of what float16 has.
_ROUNDING = 2.0**-11
#: e2m1, times two.
_FLOATS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
#: Programs per multiprocessor that keep memory busy where few rows of x are multiplied.
_RESIDENT = 4
#: The GEMV's rows and planes per program, warps, or None where tensor cores take one row of x too.
_GEMV: tuple[int, int, int] | None = (128, 2, 1)


def refusal(instance: OpInstance) -> str:
    """Why the kernels do not take the instance's weight, which has a scheme; "" where they do."""
    spec = instance.weights["weight"]
    scheme = spec.scheme
    assert scheme is not None
    if instance.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"activations are {str(instance.dtype).removeprefix('torch.')}"
    if len(spec.shape) != 2:
        return f"the weight has {len(spec.shape)} dimensions"
    if scheme.packing is Packing.FLOAT8:
        return "8-bit floats, the kernels take integers where x is not rounded"
    if scheme.group_rows > 1:
        return f"scales of {scheme.group_rows} rows"
    if scheme.codebook and scheme.packing is not Packing.UINT4:
        return "its table has more than 16 numbers"
    if scheme.group % 16:
        return f"groups of {scheme.group} columns, the kernels take multiples of 16"
    return ""


def pack(weight: QuantTensor, dtype: torch.dtype) -> Packed:
    """The tensors of a `QuantWeight`, on the weight's device. Reads a few values on the host; for use at load only.

    Two-level scales become one: float16 where that rounds none by more than `_ROUNDING`, else bfloat16 or float32.
    With float32 activations nothing is rounded.
    """
    group = _group(weight.scheme.group)
    repeats = weight.scheme.group // group
    scales = _levels(weight.scales, weight.super_scales, weight.scheme.super_group)
    offsets = None
    if weight.offsets is not None:
        offsets = _levels(weight.offsets, weight.super_offsets, weight.scheme.super_group)
    book, unit, shift = weight.codebook, 1.0, 0
    if weight.scheme.packing is Packing.UINT4 and book is None:
        zero = _zero(weight, scales, offsets)
        if zero is not None:
            offsets, shift = None, 8 - zero
        elif offsets is None:
            book = torch.arange(16.0)
    table = torch.empty(0, dtype=dtype, device=scales.device)
    if book is not None:
        floats = _unit(book)
        unit = floats or 1.0
        table = (book[:1] if floats else F.pad(book, (0, 16 - book.numel()))).to(scales.device, dtype)
    values = _planes(weight, shift)
    return (
        values,
        _by_group(scales * unit, repeats, values.shape[1], dtype),
        torch.empty(0, dtype=dtype, device=scales.device)
        if offsets is None
        else _by_group(offsets, repeats, values.shape[1], dtype),
        table,
        torch.zeros(values.shape[1] // 16, dtype=torch.int32, device=scales.device),
    )


def unpacked(instance: OpInstance, w: Packed) -> QuantWeight:
    """What `pack` made, with what only the instance knows."""
    spec = instance.weights["weight"]
    scheme = spec.scheme
    assert scheme is not None
    rows, columns = spec.shape
    values, scales, offsets, book, locks = w[:PARTS]
    wide = scheme.packing is Packing.INT8
    return QuantWeight(values, scales, offsets, book, locks, rows, columns, _group(scheme.group), wide)


def quant_product(x: torch.Tensor, weight: QuantWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [..., K] -> [..., N] of `dtype`."""
    flat = x.reshape(-1, weight.columns).contiguous()
    tokens = flat.shape[0]
    if not tokens:
        y = flat.new_empty((0, weight.rows), dtype=dtype)
    elif tokens >= _MANY_TOKENS:
        y = _by_library(flat, weight, bias, dtype)
    elif tokens == 1 and _GEMV is not None and quant_gemv.takes(weight, x.dtype):
        rows, planes, warps = _GEMV
        columns = 16 * planes if weight.bytes else 32 * planes
        splits = _splits(weight, rows, columns, 4 * _RESIDENT)
        y = quant_gemv.quant_gemv(flat, weight, bias, dtype, rows, planes, splits, warps)
    else:
        y = quant_dot(flat, weight, bias, dtype, tiling(weight, tokens, x.dtype))
    return y.view(*x.shape[:-1], weight.rows)


def tiling(weight: QuantWeight, tokens: int, dtype: torch.dtype) -> Tiles:
    """How the product with `tokens` rows of x is cut."""
    if dtype is torch.float32:
        return Tiles(32, 16, 32, 32, False, 1, 4, 1)
    height = next((size for size in (8, 16, 32, 64) if tokens <= size), 128)
    if height <= 16:
        late = weight.group >= 128
        return Tiles(64, height, 128, 128, late, _splits(weight, 64, 128, _RESIDENT), 2, 4)
    # Where there are tiles enough for every multiprocessor, larger ones read x less often.
    many = weight.rows >= 128 * processors(weight.values.device)
    if height == 32 and many:
        step, stages = (64, 4) if weight.bytes else (128, 3)
        return Tiles(64, height, step, step, False, 2, 4, stages)
    if height == 64 and many:
        return Tiles(128, height, 128, 128, False, 1, 8, 3)
    if height <= 64:
        return Tiles(64, height, 128, 128, False, _splits(weight, 64, 128, 2), 4, 3)
    if many or tokens > height:
        return Tiles(64, height, 128, 128, False, 1, 4, 3)
    return Tiles(128, height, 64, 64, False, _splits(weight, 128, 64, 1), 8, 3)


def _by_library(x: torch.Tensor, weight: QuantWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows of w made plain, as many as fit, and the library's product with them."""
    height = max(_SCRATCH // weight.columns // ROWS, 1) * ROWS
    parts = []
    for begin in range(0, weight.rows, height):
        end = min(begin + height, weight.rows)
        plain = dequantize(weight, begin, end, x.dtype)
        here = None if bias is None else bias[begin:end]
        if dtype is not x.dtype and x.is_cuda and here is None:
            parts.append(torch.mm(x, plain.t(), out_dtype=dtype))
        else:
            parts.append(F.linear(x, plain, here).to(dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _splits(weight: QuantWeight, rows: int, columns: int, resident: int) -> int:
    return splits_of(weight.rows, weight.columns, rows, columns, resident, weight.values.device)


def splits_of(rows: int, columns: int, height: int, step: int, resident: int, device: torch.device) -> int:
    """Programs per tile of `height` rows of a weight, so that each multiprocessor has `resident`; each with two steps
    of `step` columns or more."""
    wanted = processors(device) * resident // -(-rows // height)
    return max(min(wanted, columns // step // 2), 1)


def _group(group: int) -> int:
    """The largest power of two, up to `_LONGEST_GROUP`, of which `group` is a multiple."""
    return min(group & -group, _LONGEST_GROUP)


def _levels(fine: torch.Tensor, coarse: torch.Tensor | None, super_group: int) -> torch.Tensor:
    """float32 [rows, groups]."""
    fine = fine.to(torch.float32)
    return fine if coarse is None else fine * coarse.to(torch.float32).repeat_interleave(super_group, -1)


def _zero(weight: QuantTensor, scales: torch.Tensor, offsets: torch.Tensor | None) -> int | None:
    """The integer that stands for weight 0 in every group, if all codes less it are in [-8, 7]; else None."""
    if offsets is None or not scales.numel():
        return None
    largest = scales.abs().argmax()
    scale, offset = scales.flatten()[largest].item(), offsets.flatten()[largest].item()
    zero = round(-offset / scale) if scale else 0
    if not 0 <= zero <= 8 or not torch.equal(offsets, -zero * scales):
        return None
    top = max(int(weight.values.max() >> 4), int((weight.values & 15).max()))
    return zero if top + 8 - zero <= 15 else None


def _unit(book: torch.Tensor) -> float | None:
    """u where the table is u times `_FLOATS` and their negatives; None where it is another."""
    numbers = book.to(torch.float32).cpu()
    unit = numbers[1].item()
    floats = torch.tensor(_FLOATS)
    return unit if unit > 0 and torch.equal(numbers, torch.cat((floats, -floats)) * unit) else None


def _planes(weight: QuantTensor, shift: int) -> torch.Tensor:
    """int32 [planes, padded rows, 4] of the codes plus `shift`; see `quant_codes`. Some rows at a time."""
    rows, columns = weight.shape
    wide = weight.scheme.packing is Packing.INT8
    fields = 2 if wide else 4
    planes, padded = -(-columns // (8 * fields)), -(-rows // ROWS) * ROWS
    out = torch.empty((planes, padded, 16), dtype=torch.uint8, device=weight.values.device)
    height = max(_SCRATCH // max(columns, 1) // 4, 1)
    for begin in range(0, padded, height):
        end = min(begin + height, padded)
        codes = unpack_codes(weight.values[begin:end], weight.scheme.packing) + shift
        codes = F.pad(codes, (0, planes * 8 * fields - columns, 0, end - begin - codes.shape[0]))
        codes = codes.view(end - begin, planes, fields, 4, 2).permute(1, 0, 3, 4, 2).contiguous()
        flat = codes.view(planes, end - begin, -1)
        out[:, begin:end] = flat.view(torch.uint8) if wide else pack_uint4(flat)
    return out.view(torch.int32)


def _by_group(factors: torch.Tensor, repeats: int, padded: int, dtype: torch.dtype) -> torch.Tensor:
    """float32 [rows, groups] -> [groups * repeats, padded rows] of a dtype that holds them."""
    held = torch.float32 if dtype is torch.float32 else _holding(factors, (torch.float16, torch.bfloat16))
    spread = factors.repeat_interleave(repeats, -1) if repeats > 1 else factors
    return F.pad(spread.to(held).t(), (0, padded - factors.shape[0])).contiguous()


def _holding(factors: torch.Tensor, dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The first of `dtypes` that rounds no factor by more than `_ROUNDING` of it, else float32."""
    for dtype in dtypes:
        error = (factors.to(dtype).to(torch.float32) - factors).abs()
        if bool((error <= factors.abs() * _ROUNDING).all()):
            return dtype
    return torch.float32
