"""Every tensor type against the `gguf` package's dequantization (case S-24): equal to the last bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from hardpoint.weights.gguf.ggml_types import GGML_TYPES, GgmlType
from hardpoint.weights.gguf.quants import PLAIN_DTYPES, convert, scheme_of
from hardpoint.weights.gguf.source import take_rows
from hardpoint_platforms.quant import QuantTensor, unpack_codes

pytestmark = pytest.mark.reference

USABLE = [kind for kind in GGML_TYPES.values() if kind.usable]
QUANTIZED = [kind for kind in USABLE if scheme_of(kind) is not None]
BY_NAME = {kind.name: kind for kind in USABLE}
CAN_QUANTIZE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "BF16", "F16"]


def random_bytes(kind: GgmlType, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rows = (*shape[:-1], shape[-1] // kind.block * kind.bytes)
    return np.random.default_rng(seed).integers(0, 256, rows, dtype=np.uint8)


def plain(weight: torch.Tensor | QuantTensor) -> np.ndarray:
    tensor = weight.dequantize() if isinstance(weight, QuantTensor) else weight
    return tensor.to(torch.float64).numpy()


def expected(kind: GgmlType, data: np.ndarray) -> np.ndarray:
    if kind.name == "F64":
        return data.view("<f8")
    return dequantize(data, gguf.GGMLQuantizationType(kind.number)).astype(np.float64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", USABLE, ids=lambda kind: kind.name)
def test_random_blocks_dequantize_to_the_same_bits(kind: GgmlType) -> None:
    """Random bytes reach every code, scale and sign; blocks whose scale is no number are left out."""
    data = random_bytes(kind, (64, 512))
    weight = convert(kind, (64, 512), data.reshape(-1))
    wanted = expected(kind, data)
    finite = np.isfinite(wanted)
    assert finite.mean() > 0.7
    assert np.array_equal(plain(weight)[finite], wanted[finite])


@pytest.mark.parametrize("name", CAN_QUANTIZE)
def test_quantized_weights_dequantize_to_the_same_bits(name: str) -> None:
    kind = BY_NAME[name]
    values = np.random.default_rng(1).standard_normal((32, 512), dtype=np.float32) * 0.02
    data = quantize(values, gguf.GGMLQuantizationType(kind.number)).view(np.uint8)
    weight = convert(kind, (32, 512), data.reshape(-1))
    assert np.array_equal(plain(weight), expected(kind, data))


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_quantized_types_stay_small_and_keep_their_scheme(kind: GgmlType) -> None:
    weight = convert(kind, (8, 1024), random_bytes(kind, (8, 1024)).reshape(-1))
    assert isinstance(weight, QuantTensor)
    scheme = scheme_of(kind)
    assert weight.scheme == scheme
    assert scheme is not None
    assert weight.nbytes <= 8 * 1024 * 1.2
    assert (weight.offsets is not None) == scheme.offset
    assert (weight.codebook is not None) == scheme.codebook
    assert (weight.super_scales is not None) == bool(scheme.super_group)
    codes = unpack_codes(weight.values, scheme.packing)
    assert int(codes.to(torch.int16).abs().max()) < 2**scheme.bits
    assert weight.scales.shape == (8, 1024 // scheme.group)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q4_K", "Q6_K", "MXFP4", "IQ3_S", "F16"])
def test_stacked_experts_and_single_rows(name: str) -> None:
    kind = BY_NAME[name]
    data = random_bytes(kind, (3, 4, 256))
    wanted = expected(kind, data)
    finite = np.isfinite(wanted)
    assert np.array_equal(plain(convert(kind, (3, 4, 256), data.reshape(-1)))[finite], wanted[finite])
    row = convert(kind, (256,), data[0, 0])
    assert isinstance(row, torch.Tensor)
    assert np.array_equal(plain(row)[finite[0, 0]], wanted[0, 0][finite[0, 0]])


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_rows_can_be_put_in_another_order(kind: GgmlType) -> None:
    weight = convert(kind, (16, 512), random_bytes(kind, (16, 512)).reshape(-1))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    moved, straight = take_rows(weight, order), plain(weight)[order.numpy()]
    assert isinstance(moved, QuantTensor)
    assert moved.shape == (16, 512)
    assert np.array_equal(plain(moved), straight, equal_nan=True)


def test_large_scales_keep_their_offset_exact() -> None:
    """-8 times a scale near fp16's end leaves fp16; the offset is then kept wider."""
    block = np.zeros(18, dtype=np.uint8)
    block[:2] = np.frombuffer(np.float16(60000).tobytes(), dtype=np.uint8)
    weight = convert(BY_NAME["Q4_0"], (1, 32), block)
    assert np.array_equal(plain(weight), np.full((1, 32), -8 * 59968.0 if np.float16(60000) == 59968 else -480000.0))


@pytest.mark.parametrize("name", list(PLAIN_DTYPES))
def test_plain_types_keep_their_dtype_and_own_their_memory(name: str) -> None:
    kind = BY_NAME[name]
    data = random_bytes(kind, (4, 8))
    weight = convert(kind, (4, 8), data.reshape(-1))
    assert isinstance(weight, torch.Tensor)
    assert weight.dtype == PLAIN_DTYPES[name]
    before = weight.clone()
    data[:] = 0
    assert torch.equal(weight.view(torch.uint8), before.view(torch.uint8))
