"""Integer codes of the GEMM at their limits: which width holds them, and that no sum overflows.

Scales are 1 and activations whole numbers whose largest of 16 is 127, so that every product and sum is exact.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.stage import Stage
from hardpoint_cpu.native.weights import matrix_of
from hardpoint_platforms.ops.samples import Source
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor

pytestmark = pytest.mark.reference

ROWS, COLUMNS = 35, 96
#: Alone, in tiles, and with the codes of a panel unpacked first.
BATCHES = (1, 2, 3, 5, 14, 30)


def whole_numbers(codes: torch.Tensor, group: int, offset: bool = False) -> QuantTensor:
    """Codes int8 [rows, columns] as a weight; offsets are not a multiple of the scales."""
    scheme = QuantScheme("whole", Packing.INT8, 8, group, offset=offset)
    scales = torch.ones(codes.shape[0], codes.shape[1] // group)
    offsets = Source(7).integers(-5, 6, *scales.shape).float() if offset else None
    return QuantTensor(scheme, tuple(codes.shape), codes.to(torch.int8), scales, offsets)


def check(stage: Stage, weight: QuantTensor, x: torch.Tensor) -> str:
    """The product is exact at every number of rows; returns the layout."""
    matrix, kept = matrix_of(weight)
    c, (rows, columns) = stage.library.c, weight.shape
    handle = c.hp_weight_new(stage.pool.handle, ctypes.addressof(matrix), 0)
    assert handle
    wanted = x.double() @ weight.dequantize().double().T
    for batch in BATCHES:
        out = torch.full((batch, rows), float("nan"))
        stage.call(Code.LINEAR, batch, (x, handle, None, out, None), (columns, rows, columns, rows))
        assert torch.equal(out.double(), wanted[:batch]), batch
    layout: str = c.hp_weight_layout(handle).decode()
    c.hp_weight_free(handle)
    del kept
    return layout


def activations() -> torch.Tensor:
    """float32 [30, COLUMNS]."""
    x = Source(4).integers(-127, 128, max(BATCHES), COLUMNS).float()
    x[:, ::16] = torch.tensor([127.0, -127.0]).repeat(max(BATCHES) // 2)[:, None]
    return x


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("group", [16, 32])
def test_codes_take_the_fewest_bits_that_hold_them(group: int, offset: bool, any_stage: Stage) -> None:
    """The range of all codes decides, also where one code of many is beyond."""
    ranges = {(-16, 15): "u5", (0, 31): "u5", (-17, 15): "u6", (0, 32): "i8", (-1, 31): "u6", (-32, 31): "u6"}
    for (low, high), layout in {**ranges, (-33, 31): "i8", (-128, 127): "i8"}.items():
        codes = Source(3).integers(max(low, -7), 8, ROWS, COLUMNS)
        codes[20, 70], codes[34, 95] = low, high
        assert check(any_stage, whole_numbers(codes, group, offset), activations()).startswith(f"{layout} x16"), (
            low,
            high,
        )


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("low", [-128, -32, -16, 0])
def test_the_largest_sums_do_not_overflow(low: int, group: int, any_stage: Stage) -> None:
    """Signs such that all terms, or those of every other column, add up in size."""
    high = {-128: 127, -32: 31}.get(low, low + 31)
    codes = torch.full((ROWS, COLUMNS), low)
    codes[1::4], codes[2::4, ::2], codes[3::4, ::4] = high, high, high
    x = torch.full((max(BATCHES), COLUMNS), 127.0)
    x[1::4], x[2::4, ::2], x[3::4, ::4] = -127.0, -127.0, -127.0
    check(any_stage, whole_numbers(codes, group), x)


@pytest.mark.parametrize("most", [32, 33])
def test_a_codebook_of_whole_numbers_is_exact(most: int, any_stage: Stage) -> None:
    """Entries up to 32 in size, of which both limits occur, and such as need signed sums."""
    values = Source(3).integers(0, 256, ROWS, COLUMNS // 2).to(torch.uint8)
    values[0], values[1] = 0, 255
    scheme = QuantScheme("book", Packing.UINT4, 4, 32, codebook=True)
    book = torch.linspace(-most, most, 16).round()
    weight = QuantTensor(scheme, (ROWS, COLUMNS), values, torch.ones(ROWS, COLUMNS // 32), codebook=book)
    x = activations()
    x[0], x[1] = 127.0, -127.0
    assert check(any_stage, weight, x).startswith("table4 x16")
