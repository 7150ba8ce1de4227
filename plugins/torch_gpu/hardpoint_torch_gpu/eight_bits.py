"""Products of 8-bit numbers ("W8A8"): weights as they lie in the file, the input rounded at each call."""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import OpInstance, Packed
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, QuantTensor, Rounding
from hardpoint_torch_gpu.kernels.eight_bit_gemm import LEAST_ROWS, EightBitCut, EightBitWeight, eight_bit_dot
from hardpoint_torch_gpu.kernels.round_input import Rounded
from hardpoint_torch_gpu.quantized import splits_of

#: Tensors of a packed weight, before what else the op has.
PARTS = 3
#: What weights must be for what x is rounded to: tensor cores multiply numbers of one kind.
_KINDS = {Codes.INT8: Packing.INT8, Codes.FLOAT8: Packing.FLOAT8}
#: Columns per step, and the fewest that 8-bit tensor cores take.
_STEP, _LEAST_STEP = 128, 32
#: Columns whose products of integers fit in 32 bits.
_COUNTED = 1 << 17
#: Rows of x from which the vendor's library is faster on products of floats. Of integers it writes 32-bit sums, which
#: to read and scale costs more than it saves.
_LIBRARY_ROWS = 129
#: Sizes of the blocks that it knows, and the GPUs (compute capability) on which it does.
_BLOCK, _HOPPER = 128, (9, 0)
#: What the library's product asks of both sizes of the weight.
_LIBRARY_UNIT = 16


def refusal(instance: OpInstance, float8: bool, name: str = "weight") -> str:
    """Why the kernels do not take a weight of the instance, whose scheme rounds its input; "" where they do.

    `float8`: whether the device multiplies float8_e4m3fn.
    """
    spec = instance.weights[name]
    scheme = spec.scheme
    assert scheme is not None
    assert scheme.rounding is not None
    columns = spec.shape[-1]
    if instance.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"activations are {str(instance.dtype).removeprefix('torch.')}"
    if len(spec.shape) != 2:
        return f"the weight has {len(spec.shape)} dimensions"
    if scheme.packing is not _KINDS[scheme.rounding.codes]:
        return f"its input is rounded to {scheme.rounding.codes.value}, the weight is {scheme.packing.value}"
    if scheme.packing is Packing.FLOAT8 and not float8:
        return "the device multiplies no float8_e4m3fn"
    if scheme.offset or scheme.codebook or scheme.super_group:
        return "it has offsets, a table or two levels of scales"
    if step_of(scheme, columns) < _LEAST_STEP:
        groups = " and ".join(str(group) for group in _groups(scheme, columns) if group)
        return f"groups of {groups} columns, the kernels take multiples of {_LEAST_STEP}"
    if columns > _COUNTED:
        return f"{columns} columns, the kernels take up to {_COUNTED}"
    return ""


def pack(weight: QuantTensor) -> Packed:
    """The tensors of an `EightBitWeight`, on the weight's device. Codes are copied only where not contiguous."""
    locks = torch.zeros(-(-weight.shape[0] // LEAST_ROWS), dtype=torch.int32, device=weight.values.device)
    return weight.values.contiguous(), weight.scales.to(torch.float32).t().contiguous(), locks


def unpacked(instance: OpInstance, w: Packed, name: str = "weight") -> EightBitWeight:
    """What `pack` made, with what only the instance knows."""
    spec = instance.weights[name]
    scheme = spec.scheme
    assert scheme is not None
    assert scheme.rounding is not None
    group, x_group = _groups(scheme, spec.shape[-1])
    values, scales, locks = w[:PARTS]
    return EightBitWeight(values, scales, locks, group, scheme.group_rows, Rounding(scheme.rounding.codes, x_group))


def step_of(scheme: QuantScheme, columns: int) -> int:
    """Columns per step: the largest power of two up to 128 that divides each group."""
    return min(_STEP, *((group & -group) or _STEP for group in _groups(scheme, columns)))


def rounded_product(x: Rounded, weight: EightBitWeight, bias: torch.Tensor | None, step: int) -> torch.Tensor:
    """The product with an input [M, K] as `round_rows` makes it: [M, N] of its dtype. `step`: of `step_of`."""
    tokens, x = len(x.codes), weight.alike(x)
    if not tokens:
        return torch.empty((0, weight.rows), dtype=x.dtype, device=x.codes.device)
    if bias is None and _library_takes(x, weight):
        return by_library(x, weight)
    return eight_bit_dot(x, weight, bias, cutting(weight, tokens, step))


def cutting(weight: EightBitWeight, tokens: int, step: int) -> EightBitCut:
    """How the product with `tokens` rows of x is cut: of 6 cuts each the fastest on an H200 for the layers of Llama 8B.

    Few rows are limited by memory: as many loads in flight as four programs per multiprocessor have.
    """
    height = next((size for size in (8, 16, 32, 64) if tokens <= size), 128)
    rows, columns = weight.values.shape
    if tokens > 128:
        integer = weight.rounding.codes is Codes.INT8
        return EightBitCut(128, height, step, 1, 8, 3) if integer else EightBitCut(64, height, step, 1, 4, 4)
    resident = 4 if height <= 16 else 2 if height <= 64 else 1
    splits = splits_of(rows, columns, 64, step, resident, weight.values.device)
    return EightBitCut(64, height, step, splits, 4, 3 if height == 64 else 4)


def _library_takes(x: Rounded, weight: EightBitWeight) -> bool:
    """Whether the library has the product, and is faster: many rows of floats, with a scale per row or per block."""
    if weight.rounding.codes is not Codes.FLOAT8 or x.dtype is not torch.bfloat16 or len(x.codes) < _LIBRARY_ROWS:
        return False
    if x.codes.dtype is not torch.float8_e4m3fn:
        return False  # the other kind is AMD's alone, and was never given to its library
    if any(size % _LIBRARY_UNIT for size in weight.values.shape) or not x.codes.is_cuda:
        return False
    if weight.whole and weight.group_rows == 1:
        return True
    blocks = weight.group == weight.group_rows == weight.rounding.group == _BLOCK
    return blocks and torch.cuda.get_device_capability(x.codes.device) == _HOPPER


def by_library(x: Rounded, weight: EightBitWeight) -> torch.Tensor:
    """[M, rows] bfloat16, summed in float32."""
    if weight.whole:
        scales = x.scales.view(-1, 1), weight.scales
    else:  # of both the scales of a group lie together
        scales = x.scales.t(), weight.scales.t().contiguous().t()
    y: torch.Tensor = torch._scaled_mm(
        x.codes, weight.values.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False
    )
    return y


def _groups(scheme: QuantScheme, columns: int) -> tuple[int, int]:
    """Columns per scale of the weight and of x, 0 where a row has one."""
    assert scheme.rounding is not None
    group, x_group = scheme.group, scheme.rounding.group
    return (0 if group == columns else group), (0 if x_group == columns else x_group)
