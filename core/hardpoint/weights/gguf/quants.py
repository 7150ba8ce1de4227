"""ggml blocks -> the neutral `QuantTensor`, exactly: dequantized, every weight equals the file's to the last bit.

Each converter gets the blocks of a tensor as uint8 [..., blocks per row, bytes per block] and returns its parts. What
has no neutral form (the IQ1, IQ2 and IQ3 families index tables of 4 or 8 weights at once) is dequantized here with the
`gguf` package and becomes a plain fp32 tensor.

Block layouts are those of ggml-common.h (ggml, MIT licence).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.weights.gguf.ggml_types import GgmlType
from hardpoint_platforms.ops.contract import Weight
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[np.generic]

#: 4-bit code points: IQ4_NL and IQ4_XS, and FP4 (e2m1) times two.
IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

_LOW, _FOUR, _TWO_BITS = np.uint8(15), np.uint8(4), np.uint8(3)
_LOW_PAIR, _HIGH_PAIR = np.uint64(0x000F000F000F000F), np.uint64(0x00F000F000F000F0)

PLAIN_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}


@dataclass(frozen=True, eq=False)
class _Parts:
    """Fields of a QuantTensor before they are torch tensors; see there."""

    values: Bytes | npt.NDArray[np.int8]
    scales: Array
    offsets: Array | None = None
    super_scales: Array | None = None
    super_offsets: Array | None = None
    codebook: tuple[int, ...] | None = None
    #: `scales` are the upper halves of fp32 numbers
    bfloat16_scales: bool = False


def scheme_of(kind: GgmlType) -> QuantScheme | None:
    """The neutral scheme of a type, or None where it becomes a plain tensor."""
    entry = _CONVERTERS.get(kind.name)
    return entry[0] if entry else None


def convert(kind: GgmlType, shape: tuple[int, ...], data: Bytes) -> Weight:
    """Raw bytes of a tensor to a weight of logical shape `shape`, in memory of its own.

    A QuantTensor for the types of `scheme_of`, else a plain tensor: F32, F16, BF16 and F64 as stored, the rest fp32.
    One row (a norm, a bias) always becomes plain.
    """
    if kind.name in PLAIN_DTYPES:
        return torch.frombuffer(bytearray(data), dtype=PLAIN_DTYPES[kind.name]).reshape(shape)
    entry = _CONVERTERS.get(kind.name)
    if entry is None:
        return _dequantize(kind, shape, data)
    scheme, converter = entry
    blocks = data.reshape(*shape[:-1], shape[-1] // kind.block, kind.bytes)
    parts = converter(blocks)
    tensor = QuantTensor(
        scheme,
        shape,
        values=_rows(parts.values, shape, Packing.INT8 is scheme.packing),
        scales=_scales(parts, shape),
        offsets=_per_row(parts.offsets, shape),
        super_scales=_per_row(parts.super_scales, shape),
        super_offsets=_per_row(parts.super_offsets, shape),
        codebook=None if parts.codebook is None else torch.tensor(parts.codebook, dtype=torch.float32),
    )
    return tensor if len(shape) > 1 else tensor.dequantize()


def _rows(values: Array, shape: tuple[int, ...], one_byte: bool) -> torch.Tensor:
    width = shape[-1] if one_byte else shape[-1] // 2
    return torch.from_numpy(np.ascontiguousarray(values).reshape(*shape[:-1], width))


def _per_row(part: Array | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    return None if part is None else torch.from_numpy(np.ascontiguousarray(part).reshape(*shape[:-1], -1))


def _scales(parts: _Parts, shape: tuple[int, ...]) -> torch.Tensor:
    scales = torch.from_numpy(np.ascontiguousarray(parts.scales).reshape(*shape[:-1], -1))
    return scales.view(torch.bfloat16) if parts.bfloat16_scales else scales


def _dequantize(kind: GgmlType, shape: tuple[int, ...], data: Bytes) -> torch.Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = data.reshape(*shape[:-1], shape[-1] // kind.block * kind.bytes)
    plain = dequantize(rows, GGMLQuantizationType(kind.number))
    return torch.from_numpy(np.ascontiguousarray(plain, dtype=np.float32).reshape(shape))


def _half(blocks: Bytes, start: int) -> npt.NDArray[np.float16]:
    """The fp16 number at byte `start` of each block: [..., blocks, 1]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")


def _times(half: npt.NDArray[np.float16], factor: int) -> Array:
    """fp16 times a power of two (exact), in fp32 where it leaves fp16's range."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = half.astype(np.float32) * factor
        narrow = product.astype(np.float16)
    return narrow if bool(np.array_equal(narrow.astype(np.float32), product, equal_nan=True)) else product


def _nibble_runs(packed: Bytes, run: int) -> Bytes:
    """Repack nibbles: ggml keeps `run` columns in the low nibbles of `run` bytes and the next `run` in the high ones;
    neutral uint4 pairs neighbours. uint8 [..., bytes] to uint8 [..., bytes].
    """
    words = np.ascontiguousarray(packed).view("<u8")
    fours = words >> np.uint64(4)
    out = np.empty((*packed.shape[:-1], packed.shape[-1] // run, 2, run // 2), dtype=np.uint8)
    halves = (words & _LOW_PAIR) | (fours & _HIGH_PAIR), (fours & _LOW_PAIR) | ((words >> np.uint64(8)) & _HIGH_PAIR)
    for place, pairs in enumerate(halves):
        # each 16 bits hold a pair in their low byte
        out[..., place, :] = pairs.view(np.uint8)[..., ::2].reshape(*out.shape[:-2], run // 2)
    return out.reshape(packed.shape)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """One code per byte, in column order: uint8 [..., bytes] to uint8 [..., 2 * bytes]."""
    grouped = packed.reshape(*packed.shape[:-1], -1, 1, run)
    return np.concatenate((grouped & _LOW, grouped >> _FOUR), axis=-2).reshape(*packed.shape[:-1], -1)


def _twos(packed: Bytes) -> Bytes:
    """2-bit codes of k-quants: bits 2i of 32 bytes are columns 32i..32i+31. uint8 [..., n] to [..., 4n]."""
    grouped = packed.reshape(*packed.shape[:-1], -1, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)
    return ((grouped >> shifts) & _TWO_BITS).reshape(*packed.shape[:-1], -1)


def _pack4(codes: Bytes) -> Bytes:
    """Codes below 16, one per byte, to neutral uint4."""
    return codes[..., 0::2] | (codes[..., 1::2] << _FOUR)


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 12 bytes of eight 6-bit scales and eight 6-bit minima (Q4_K, Q5_K): uint8 [..., 8] each."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)), axis=-1)
    minima = np.concatenate((mid & 63, (high >> 4) | ((mid >> 2) & 48)), axis=-1)
    return scales, minima


def _q4_0(blocks: Bytes) -> _Parts:
    scale = _half(blocks, 0)
    return _Parts(_nibble_runs(blocks[..., 2:], 16), scale, _times(scale, -8))


def _q4_1(blocks: Bytes) -> _Parts:
    return _Parts(_nibble_runs(blocks[..., 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    bits = np.unpackbits(np.ascontiguousarray(blocks[..., start : start + 4]), axis=-1, bitorder="little")
    return bits << _FOUR


def _q5_0(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks, 2)
    return _Parts(codes.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks, 4)
    return _Parts(codes.view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> _Parts:
    return _Parts(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0))


def _q2_k(blocks: Bytes) -> _Parts:
    fine = blocks[..., 0:16]
    minimum = np.negative(_half(blocks, 82))
    return _Parts(_pack4(_twos(blocks[..., 16:80])), fine & 15, fine >> 4, _half(blocks, 80), minimum)


def _q3_k(blocks: Bytes) -> _Parts:
    high_bits = np.unpackbits(blocks[..., None, 0:32], axis=-2, bitorder="little")
    # unpackbits along the new axis gives bit i of all 32 bytes as row i: columns 32i..32i+31.
    codes = _twos(blocks[..., 32:96]) | (high_bits.reshape(*blocks.shape[:-1], 256) << np.uint8(2))
    packed = blocks[..., 96:108]
    low = np.concatenate((packed[..., 0:8] & 15, packed[..., 0:8] >> 4), axis=-1)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)
    high = ((packed[..., None, 8:12] >> shifts) & 3).reshape(*low.shape)
    scales = (low | (high << 4)).view(np.int8) - np.int8(32)
    # weight = d * scale * (code - 4), so that the offset is scale * (-4 d)
    scale = _half(blocks, 108)
    return _Parts(_pack4(codes), scales, scales, scale, _times(scale, -4))


def _q4_k(blocks: Bytes) -> _Parts:
    scales, minima = _k_scales(blocks[..., 4:16])
    values = _nibble_runs(blocks[..., 16:], 32)
    return _Parts(values, scales, minima, _half(blocks, 0), np.negative(_half(blocks, 2)))


def _q5_k(blocks: Bytes) -> _Parts:
    scales, minima = _k_scales(blocks[..., 4:16])
    bits = np.unpackbits(blocks[..., None, 16:48], axis=-2, bitorder="little").reshape(*blocks.shape[:-1], 256)
    codes = _nibbles(blocks[..., 48:], 32) | (bits << 4)
    return _Parts(codes.view(np.int8), scales, minima, _half(blocks, 0), np.negative(_half(blocks, 2)))


def _q6_k(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[..., 0:128], 64) | (_twos(blocks[..., 128:192]) << 4)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _Parts(codes.view(np.int8) - np.int8(32), scales, super_scales=_half(blocks, 208))


def _iq4_nl(blocks: Bytes) -> _Parts:
    return _Parts(_nibble_runs(blocks[..., 2:], 16), _half(blocks, 0), codebook=IQ4_CODES)


def _iq4_xs(blocks: Bytes) -> _Parts:
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2")
    top = ((high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8)
    low = np.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), axis=-1).reshape(*blocks.shape[:-1], 8)
    scales = (low | (top << 4)).view(np.int8) - np.int8(32)
    values = _nibble_runs(blocks[..., 8:], 16)
    return _Parts(values, scales, super_scales=_half(blocks, 0), codebook=IQ4_CODES)


def _mxfp4(blocks: Bytes) -> _Parts:
    exponent = blocks[..., 0:1].astype(np.uint16)
    # 2 ** (exponent - 128) as bfloat16; the two smallest are subnormal.
    bits = np.where(exponent < 2, np.uint16(0x20) << exponent, (exponent - np.uint16(1)) << np.uint16(7))
    values = _nibble_runs(blocks[..., 1:], 16)
    return _Parts(values, bits.astype(np.uint16).view(np.int16), codebook=FP4_CODES, bfloat16_scales=True)


def _nvfp4(blocks: Bytes) -> _Parts:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    table = np.where(exponent == 0, mantissa * 2.0**-10, (1 + mantissa / 8) * 2.0 ** (exponent - 8.0))
    table[[0, 0x7F]] = 0.0
    return _Parts(_nibble_runs(blocks[..., 4:], 8), table.astype(np.float16)[blocks[..., 0:4]], codebook=FP4_CODES)


def _tq2_0(blocks: Bytes) -> _Parts:
    scale = _half(blocks, 64)
    return _Parts(_pack4(_twos(blocks[..., 0:64])), scale, _times(scale, -1))


def _tq1_0(blocks: Bytes) -> _Parts:
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8).reshape(5, 1)
    lead = blocks.shape[:-1]
    runs = (
        (blocks[..., None, 0:32] * powers).reshape(*lead, 160),
        (blocks[..., None, 32:48] * powers).reshape(*lead, 80),
        (blocks[..., None, 48:52] * powers[:4]).reshape(*lead, 16),
    )
    codes = ((np.concatenate(runs, axis=-1).astype(np.uint16) * 3) >> 8).astype(np.uint8)
    scale = _half(blocks, 52)
    return _Parts(_pack4(codes), scale, _times(scale, -1))


_Converter = Callable[[Bytes], _Parts]
_U4, _I8 = Packing.UINT4, Packing.INT8
_CONVERTERS: Mapping[str, tuple[QuantScheme, _Converter]] = {
    "Q4_0": (QuantScheme("q4_0", _U4, bits=4, group=32, offset=True), _q4_0),
    "Q4_1": (QuantScheme("q4_1", _U4, bits=4, group=32, offset=True), _q4_1),
    "Q5_0": (QuantScheme("q5_0", _I8, bits=5, group=32), _q5_0),
    "Q5_1": (QuantScheme("q5_1", _I8, bits=5, group=32, offset=True), _q5_1),
    "Q8_0": (QuantScheme("q8_0", _I8, bits=8, group=32), _q8_0),
    "Q2_K": (QuantScheme("q2_k", _U4, bits=2, group=16, super_group=16, offset=True), _q2_k),
    "Q3_K": (QuantScheme("q3_k", _U4, bits=3, group=16, super_group=16, offset=True), _q3_k),
    "Q4_K": (QuantScheme("q4_k", _U4, bits=4, group=32, super_group=8, offset=True), _q4_k),
    "Q5_K": (QuantScheme("q5_k", _I8, bits=5, group=32, super_group=8, offset=True), _q5_k),
    "Q6_K": (QuantScheme("q6_k", _I8, bits=6, group=16, super_group=16), _q6_k),
    "IQ4_NL": (QuantScheme("iq4_nl", _U4, bits=4, group=32, codebook=True), _iq4_nl),
    "IQ4_XS": (QuantScheme("iq4_xs", _U4, bits=4, group=32, super_group=8, codebook=True), _iq4_xs),
    "MXFP4": (QuantScheme("mxfp4", _U4, bits=4, group=32, codebook=True), _mxfp4),
    "NVFP4": (QuantScheme("nvfp4", _U4, bits=4, group=16, codebook=True), _nvfp4),
    "TQ1_0": (QuantScheme("tq1_0", _U4, bits=2, group=256, offset=True), _tq1_0),
    "TQ2_0": (QuantScheme("tq2_0", _U4, bits=2, group=256, offset=True), _tq2_0),
}
