"""Weights packed by hand in each format, beside the plain weights that they mean.

Every packing is spelled as its format's description has it, integer by integer along an axis, and shares nothing with
the readers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]
#: (name of the module, weight float32 [rows, columns]) -> (its tensors, the plain weight that they mean)
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
GROUP = 32


def words(numbers: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Unsigned integers packed along an axis, 32 / bits to an int32, the first lowest; filled up with zeros."""
    per, moved = 32 // bits, numbers.long().movedim(axis, 0)
    out = torch.zeros(-(-moved.shape[0] // per), *moved.shape[1:], dtype=torch.int64)
    for place in range(moved.shape[0]):
        out[place // per] += moved[place] << bits * (place % per)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32).movedim(0, axis)


def _float8(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a weight under scales of its own shape, and what they mean."""
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float() * scale


def _blocks(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per block of both axes, and the same for each number."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // block), -(-columns // block))
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            here = weight[r * block : (r + 1) * block, c * block : (c + 1) * block]
            scales[r, c] = here.abs().max() / 448
    return scales, scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]


def float8_blocks(scale: str, dtype: torch.dtype = torch.float32) -> Writer:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales, full = _blocks(weight, GROUP)
        if dtype is torch.float8_e8m0fnu:
            scales, full = (2.0 ** torch.log2(part).ceil() for part in (scales, full))
        codes, plain = _float8(weight, full)
        return {f"{name}.weight": codes, f"{name}.{scale}": scales.to(dtype)}, plain

    return write


def float8_tensor(shape: tuple[int, ...] = (), **beside: float) -> Writer:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = weight.abs().max() / 448
        codes, plain = _float8(weight, scale)
        extra = {f"{name}.{key}": torch.tensor(value) for key, value in beside.items()}
        return {f"{name}.weight": codes, f"{name}.weight_scale": scale.reshape(shape), **extra}, plain

    return write


def float8_rows(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes, plain = _float8(weight, scale.float())
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, plain


def integers(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned integers [rows, columns], scales and zeros [rows, groups], and the plain weight."""
    rows, columns = weight.shape
    parts = weight.reshape(rows, -1, group if group > 0 else columns)
    top = (1 << bits) - 1
    if symmetric:
        scales = parts.abs().amax(-1, keepdim=True) / (top // 2)
        zeros = torch.full_like(scales, 1 << bits - 1)
    else:
        low, high = parts.amin(-1, keepdim=True).clamp(max=0), parts.amax(-1, keepdim=True).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round().clamp(1, top)
    scales = scales.to(dtype).float()
    codes = ((parts / scales).round() + zeros).clamp(0, top)
    plain = scales * (codes - zeros)
    return codes.reshape(rows, columns), scales[..., 0].to(dtype), zeros[..., 0], plain.reshape(rows, columns)


def integers8(symmetric: bool, per_row: bool) -> Writer:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        whole = weight if per_row else weight.reshape(1, -1)
        codes, scales, zeros, plain = integers(whole, 8, -1, symmetric, torch.bfloat16)
        own = {f"{name}.weight": (codes - 128).to(torch.int8).reshape(weight.shape), f"{name}.weight_scale": scales}
        if not symmetric:
            own[f"{name}.weight_zero_point"] = (zeros - 128).to(torch.int8)
        return own, plain.reshape(weight.shape)

    return write


def packed(bits: int, group: int, symmetric: bool, *, loose_zeros: bool = False, order: bool = False) -> Writer:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        index = _shuffled(weight.shape[1], name)
        sorted_weight = weight[:, index] if order else weight
        codes, scales, zeros, plain = integers(sorted_weight, bits, group, symmetric)
        own = {
            f"{name}.weight_shape": torch.tensor(weight.shape),
            f"{name}.weight_scale": scales,
        }
        if order:
            back = index.argsort()
            codes, plain = codes[:, back], plain[:, back]
            own[f"{name}.weight_g_idx"] = (back // group).to(torch.int32)
        own[f"{name}.weight_packed"] = words(codes, bits, 1)
        if not symmetric and loose_zeros:
            own[f"{name}.weight_zero_point"] = (zeros - (1 << bits - 1)).to(torch.int8)
        elif not symmetric:
            own[f"{name}.weight_zero_point"] = words(zeros, bits, 0)
        return own, plain

    return write


def gptq(
    bits: int, group: int, symmetric: bool, *, version: int = 1, order: bool = False, index: bool = True
) -> Writer:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        back = _shuffled(columns, name).argsort() if order else torch.arange(columns)
        codes, scales, zeros, plain = integers(weight[:, back.argsort()], bits, group, symmetric)
        codes, plain = codes[:, back], plain[:, back]
        own = {
            f"{name}.qweight": words(codes.t(), bits, 0),
            f"{name}.scales": scales.t(),
            f"{name}.qzeros": words((zeros - (1 if version == 1 else 0)).t(), bits, 1),
        }
        if index:
            own[f"{name}.g_idx"] = (back // (group if group > 0 else columns)).to(torch.int32)
        return own, plain

    return write


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, plain = integers(weight, 4, GROUP, False)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the row that lies in each place of a word

    def interleaved(numbers: torch.Tensor) -> torch.Tensor:
        return words(numbers.reshape(numbers.shape[0], -1, 8)[..., order].flatten(1), 4, 1)

    own = {
        f"{name}.qweight": interleaved(codes.t()),
        f"{name}.qzeros": interleaved(zeros.t()),
        f"{name}.scales": scales.t(),
    }
    return own, plain


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Any number of axes before the columns; `name` is the whole name."""
    parts = weight.reshape(*weight.shape[:-1], -1, 32)
    exponent = (torch.log2(parts.abs().amax(-1, keepdim=True) / 6)).ceil()
    codes = (parts[..., None] / 2.0 ** exponent[..., None] - FP4).abs().argmin(-1)
    plain = (FP4[codes] * 2.0**exponent).reshape(weight.shape)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponent[..., 0] + 127).to(torch.uint8)}, plain


def _shuffled(columns: int, name: str) -> torch.Tensor:
    return torch.randperm(columns, generator=torch.Generator().manual_seed(len(name)))
