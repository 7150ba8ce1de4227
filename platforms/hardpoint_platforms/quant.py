"""`QuantTensor`: one neutral form for every quantized weight.

File formats (GGUF, GPTQ, AWQ, compressed-tensors, MXFP4 ...) are parsed by the core into this form; a device implements
schemes, never file formats. A weight of shape [rows, columns] is cut into groups of `group` columns:

    weight[r, c] = scale[r, c // group] * code(r, c) + offset[r, c // group]

where `code` is the stored integer, or `codebook[stored integer]` where a codebook is given, and

    scale[r, g] = scales[r, g] * super_scales[r, g // super_group]      (super_scales absent: scales[r, g])
    offset[r, g] = offsets[r, g] * super_offsets[r, g // super_group]   (offsets absent: 0)

The two levels are how k-quants keep 6-bit scales under an fp16 scale of 256 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Packing(Enum):
    """How the integers of a row lie in `values`."""

    INT8 = "int8"  # one signed 8-bit integer per column: values int8 [rows, columns]
    UINT4 = "uint4"  # two columns per byte, even column in the low nibble: values uint8 [rows, columns // 2]


@dataclass(frozen=True)
class QuantScheme:
    """What a device must know to say whether it takes a weight.

    Attributes:
        name: the family's usual name ("q4_1", "q4_k", "gptq4"), for people; kernels look at the fields.
        packing: layout of the integers.
        bits: significant bits per code, at most the packing's width.
        group: columns per scale.
        super_group: groups per second-level scale, 0 where there is one level.
        offset: whether offsets are present.
        codebook: whether codes index a table.
    """

    name: str
    packing: Packing
    bits: int
    group: int
    super_group: int = 0
    offset: bool = False
    codebook: bool = False


@dataclass(frozen=True)
class QuantTensor:
    """A quantized weight of logical shape [rows, columns] (or [experts, rows, columns], all parts alike).

    Attributes:
        scheme: how to read the parts.
        shape: logical shape.
        values: packed integers, see `Packing`.
        scales: [..., rows, columns // group], float or (with super_scales) int8 or uint8.
        offsets: like scales, or None.
        super_scales: float [..., rows, groups // super_group], or None.
        super_offsets: likewise, or None.
        codebook: float [2 ** bits], or None.
    """

    scheme: QuantScheme
    shape: tuple[int, ...]
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    super_scales: torch.Tensor | None = None
    super_offsets: torch.Tensor | None = None
    codebook: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        parts = (self.values, self.scales, self.offsets, self.super_scales, self.super_offsets, self.codebook)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain weight, shape `shape`. Computed in fp32, then cast to `dtype`."""
        codes = unpack_codes(self.values, self.scheme.packing).to(torch.float32)
        if self.codebook is not None:
            codes = self.codebook.to(torch.float32)[codes.long()]
        # In place: on the host, fresh memory costs more than the arithmetic.
        weight = codes.reshape(*codes.shape[:-1], -1, self.scheme.group)
        weight.mul_(_two_level(self.scales, self.super_scales, self.scheme.super_group)[..., None])
        if self.offsets is not None:
            weight.add_(_two_level(self.offsets, self.super_offsets, self.scheme.super_group)[..., None])
        return weight.reshape(self.shape).to(dtype)


def unpack_codes(values: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Stored integers, one per column: int8 as they are, uint4 as uint8 of twice the width."""
    if packing is Packing.INT8:
        return values
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)


def pack_uint4(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_codes` for `Packing.UINT4`: uint8 [..., columns] below 16 to [..., columns // 2]."""
    pairs = codes.to(torch.uint8).reshape(*codes.shape[:-1], -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous()


def _two_level(fine: torch.Tensor, coarse: torch.Tensor | None, super_group: int) -> torch.Tensor:
    fine = fine.to(torch.float32)
    if coarse is None:
        return fine
    return (fine.reshape(*fine.shape[:-1], -1, super_group) * coarse.to(torch.float32)[..., None]).flatten(-2)
