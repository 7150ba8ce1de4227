"""`QuantTensor`: packing round trips, and dequantization equals the formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor, pack_uint4, unpack_codes

pytestmark = pytest.mark.reference


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
def test_pack_uint4_round_trip(codes):
    row = torch.tensor([codes, codes[::-1]])
    packed = pack_uint4(row)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, len(codes) // 2)
    assert torch.equal(unpack_codes(packed, Packing.UINT4), row.to(torch.uint8))


def test_the_even_column_is_the_low_nibble():
    assert pack_uint4(torch.tensor([1, 2])).tolist() == [0x21]


def test_one_level_with_offsets():
    scheme = QuantScheme("q4_1", Packing.UINT4, 4, 2, offset=True)
    weight = QuantTensor(
        scheme,
        (1, 4),
        pack_uint4(torch.tensor([[0, 15, 3, 4]])),
        torch.tensor([[2.0, 0.5]]),
        torch.tensor([[-1.0, 10.0]]),
    )
    assert weight.dequantize().tolist() == [[-1.0, 29.0, 11.5, 12.0]]


def test_two_levels():
    scheme = QuantScheme("k", Packing.INT8, 8, 1, super_group=2, offset=True)
    weight = QuantTensor(
        scheme,
        (1, 4),
        torch.tensor([[1, -2, 3, -128]], dtype=torch.int8),
        torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8),
        torch.tensor([[1, 0, 1, 0]], dtype=torch.uint8),
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([[-1.0, 8.0]]),
    )
    assert weight.dequantize().tolist() == [[-0.5, -2.0, 26.0, -1024.0]]


def test_codebook():
    scheme = QuantScheme("nf", Packing.UINT4, 4, 2, codebook=True)
    book = torch.linspace(-1, 1, 16)
    weight = QuantTensor(scheme, (1, 2), pack_uint4(torch.tensor([[0, 15]])), torch.tensor([[3.0]]), codebook=book)
    assert weight.dequantize().tolist() == [[-3.0, 3.0]]


@pytest.mark.parametrize("name", SCHEMES)
def test_shapes_sizes_and_experts(name):
    source = Source(1)
    weight = quantized(source, (3, 4, 256), SCHEMES[name])
    plain = weight.dequantize(torch.bfloat16)
    assert plain.dtype == torch.bfloat16
    assert plain.shape == (3, 4, 256)
    assert weight.nbytes < plain.numel() * 2
    assert 0.01 < plain.float().std() < 1.0
