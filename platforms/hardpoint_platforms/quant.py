"""`QuantTensor`: one neutral form for every quantized weight.

File formats (GGUF, GPTQ, AWQ, compressed-tensors, MXFP4 ...) are parsed by the core into this form; a device implements
schemes, never file formats. A weight of shape [rows, columns] is cut into groups of `group` columns:

    weight[r, c] = scale[r, c // group] * code(r, c) + offset[r, c // group]

where `code` is the stored integer, or `codebook[stored integer]` where a codebook is given, and

    scale[r, g] = scales[r, g] * super_scales[r, g // super_group]      (super_scales absent: scales[r, g])
    offset[r, g] = offsets[r, g] * super_offsets[r, g // super_group]   (offsets absent: 0)

The two levels are how k-quants keep 6-bit scales under an fp16 scale of 256 columns. Where scales are shared by rows
too (blocks of 128 x 128), `scales` has one row per `group_rows` rows, the last block being what is left.

A scheme may ask for its input to be rounded as well ("W8A8"), so that the product is one of 8-bit numbers: see
`Rounding`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch


class Packing(Enum):
    """How the integers of a row lie in `values`."""

    INT8 = "int8"  # one signed 8-bit integer per column: values int8 [rows, columns]
    UINT4 = "uint4"  # two columns per byte, even column in the low nibble: values uint8 [rows, columns // 2]
    FLOAT8 = "float8"  # one number per column, "integers" only by name: values torch.float8_e4m3fn [rows, columns]


class Codes(Enum):
    """What the numbers of a rounded input are."""

    INT8 = "int8"  # -127 to 127
    FLOAT8 = "float8"  # torch.float8_e4m3fn, at most 448


@dataclass(frozen=True)
class Rounding:
    """How the input of a product is rounded, token by token, each group of columns on a scale of its own.

    scale = largest magnitude in the group / largest code; code = x / scale, rounded to the nearest, of two equally near
    to the even one. All in float32, with a true division: implementations agree to the bit. A group of zeros has zeros.

    Attributes:
        codes: what x is rounded to.
        group: columns per scale; 0: the whole row.
    """

    codes: Codes
    group: int = 0


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
        group_rows: rows that share their scales; more than 1 only with one level of scales and without offsets.
        rounding: of the input of `linear`, of each product of a block and of both of `experts`; None: it stays as it
            is. Other ops that meet such a weight take it as if it were None.
    """

    name: str
    packing: Packing
    bits: int
    group: int
    super_group: int = 0
    offset: bool = False
    codebook: bool = False
    group_rows: int = 1
    rounding: Rounding | None = None


@dataclass(frozen=True)
class QuantTensor:
    """A quantized weight of logical shape [rows, columns] (or [experts, rows, columns], all parts alike).

    Attributes:
        scheme: how to read the parts.
        shape: logical shape.
        values: packed integers, see `Packing`.
        scales: [..., ceil(rows / group_rows), columns // group], float or (with super_scales) int8 or uint8.
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
        scales = _two_level(self.scales, self.super_scales, self.scheme.super_group)
        if self.scheme.group_rows > 1:
            scales = self._spread(scales)
        weight.mul_(scales[..., None])
        if self.offsets is not None:
            weight.add_(_two_level(self.offsets, self.super_offsets, self.scheme.super_group)[..., None])
        return weight.reshape(self.shape).to(dtype)

    def with_row_scales(self) -> QuantTensor:
        """The same weight with `group_rows` 1: scales that rows share are repeated."""
        if self.scheme.group_rows == 1:
            return self
        return replace(self, scheme=replace(self.scheme, group_rows=1), scales=self._spread(self.scales).contiguous())

    def _spread(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.repeat_interleave(self.scheme.group_rows, -2)[..., : self.shape[-2], :]


def unpack_codes(values: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Stored numbers, one per column: of 8 bits as they are, uint4 as uint8 of twice the width."""
    if packing is not Packing.UINT4:
        return values
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)


def round_input(x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """x [..., K] as a product over rounded inputs sees it: float32 of the same shape, see `Rounding`."""
    wide = x.to(torch.float32)
    groups = wide.unflatten(-1, (-1, rounding.group or x.shape[-1]))
    integers = rounding.codes is Codes.INT8
    scale = groups.abs().amax(-1, keepdim=True) / (127.0 if integers else torch.finfo(torch.float8_e4m3fn).max)
    ratio = groups / torch.where(scale > 0, scale, 1.0)
    codes = ratio.round() if integers else ratio.to(torch.float8_e4m3fn).to(torch.float32)
    rounded: torch.Tensor = (codes * scale).flatten(-2)
    return rounded


def pack_uint4(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_codes` for `Packing.UINT4`: uint8 [..., columns] below 16 to [..., columns // 2]."""
    pairs = codes.to(torch.uint8).reshape(*codes.shape[:-1], -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous()


def _two_level(fine: torch.Tensor, coarse: torch.Tensor | None, super_group: int) -> torch.Tensor:
    fine = fine.to(torch.float32)
    if coarse is None:
        return fine
    return (fine.reshape(*fine.shape[:-1], -1, super_group) * coarse.to(torch.float32)[..., None]).flatten(-2)
