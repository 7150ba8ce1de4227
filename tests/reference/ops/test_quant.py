"""`QuantTensor`: packing round trips, and dequantization equals the formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized
from hardpoint_platforms.quant import (
    Codes,
    Packing,
    QuantScheme,
    QuantTensor,
    Rounding,
    pack_uint4,
    round_input,
    unpack_codes,
)

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


def test_float8_numbers_are_multiplied_as_they_are():
    scheme = QuantScheme("fp8", Packing.FLOAT8, 8, 2)
    codes = torch.tensor([[448.0, -0.5, 2.0**-9, 1.125]]).to(torch.float8_e4m3fn)
    weight = QuantTensor(scheme, (1, 4), codes, torch.tensor([[2.0, 0.5]]))
    assert weight.dequantize().tolist() == [[896.0, -1.0, 2.0**-10, 0.5625]]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_scales_that_rows_share(rows):
    """Blocks of 2 x 2; the last one may be cut off."""
    scheme = QuantScheme("block", Packing.INT8, 8, 2, group_rows=2)
    values = torch.arange(4 * rows, dtype=torch.int8).reshape(rows, 4) + 1
    scales = torch.tensor([[1.0, 10.0], [100.0, 1000.0], [0.5, 0.25]])[: -(-rows // 2)]
    weight = QuantTensor(scheme, (rows, 4), values, scales)
    wanted = [[float(values[r, c] * scales[r // 2, c // 2]) for c in range(4)] for r in range(rows)]
    assert weight.dequantize().tolist() == wanted
    apart = weight.with_row_scales()
    assert apart.scheme.group_rows == 1
    assert apart.scales.shape == (rows, 2)
    assert apart.dequantize().tolist() == wanted
    assert apart.with_row_scales() is apart


def test_blocks_of_experts():
    scheme = QuantScheme("block", Packing.INT8, 8, 2, group_rows=2)
    values = torch.ones(2, 3, 2, dtype=torch.int8)
    weight = QuantTensor(scheme, (2, 3, 2), values, torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]))
    assert weight.dequantize()[..., 0].tolist() == [[1.0, 1.0, 2.0], [3.0, 3.0, 4.0]]
    assert torch.equal(weight.with_row_scales().dequantize(), weight.dequantize())


@pytest.mark.parametrize("codes", list(Codes))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros(codes, dtype):
    x = torch.zeros(2, 8, dtype=dtype)
    x[1, 5] = 3.0
    found = round_input(x, Rounding(codes, 4))
    assert found.dtype == torch.float32
    assert torch.equal(found, x.float())
    assert round_input(x[:0], Rounding(codes)).shape == (0, 8)


def test_int8_ties_go_to_the_even_code():
    # the largest magnitude is 127, so that codes are the numbers themselves
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.4999999]])
    assert round_input(x, Rounding(Codes.INT8)).tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 0.0]]


def test_float8_ties_go_to_the_even_code():
    # 448 is the largest code; between 16 and 32 codes are 2 apart, below 2 ** -6 they are 2 ** -9 apart
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, -19.0, 1.5 * 2.0**-9, 0.5 * 2.0**-9, 2.5 * 2.0**-9]])
    wanted = [[448.0, 16.0, 20.0, -16.0, -20.0, 2.0**-8, 0.0, 2.0**-8]]
    assert round_input(x, Rounding(Codes.FLOAT8)).tolist() == wanted


@pytest.mark.parametrize("codes", list(Codes))
def test_each_token_and_group_has_a_scale_of_its_own(codes):
    x = Source(4).normal(3, 8) * torch.tensor([1e-4, 1.0, 1e4])[:, None]
    whole, grouped = round_input(x, Rounding(codes)), round_input(x, Rounding(codes, 4))
    for row in range(3):
        assert torch.equal(whole[row], round_input(x[row], Rounding(codes)))
        for start in (0, 4):
            part = x[row, start : start + 4]
            assert torch.equal(grouped[row, start : start + 4], round_input(part, Rounding(codes)))
            # the largest of a group has the largest code
            assert torch.isclose(grouped[row, start : start + 4].abs().max(), part.abs().max(), rtol=1e-6)
    assert not torch.equal(whole, grouped)
