"""Quantized weights that a checkpoint holds in pieces, joined along rows: scales of blocks included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.layers.op import Part, join_rows, stack
from hardpoint.models.pieces import Pieces
from hardpoint_platforms.ops.contract import WeightSpec
from hardpoint_platforms.ops.samples import Source, quantized
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, QuantTensor, Rounding

pytestmark = pytest.mark.reference

BLOCKS = QuantScheme("b", Packing.FLOAT8, 8, 32, group_rows=32, rounding=Rounding(Codes.FLOAT8, 32))


def _part(rows: int, seed: int, scheme: QuantScheme = BLOCKS) -> tuple[Part, QuantTensor]:
    weight = quantized(Source(seed), (rows, 64), scheme)
    return Part(WeightSpec(weight.shape, torch.float32, scheme), lambda: weight), weight


def _load(part: Part) -> QuantTensor:
    pieces = part.load()
    assert isinstance(pieces, Pieces)
    whole = pieces.join()
    assert isinstance(whole, QuantTensor)
    assert (whole.scheme, whole.shape) == (part.spec.scheme, part.spec.shape)
    return whole


@pytest.mark.parametrize(
    ("rows", "shared"),
    [((32, 64), True), ((64, 32, 7), True), ((48, 32), False), ((7, 7), False), ((32, 40, 64), False)],
)
def test_blocks_stay_where_they_end_with_the_pieces(rows: tuple[int, ...], shared: bool) -> None:
    parts, weights = zip(*(_part(count, seed) for seed, count in enumerate(rows)), strict=True)
    joined = join_rows(parts)
    assert joined.spec.scheme == (BLOCKS if shared else replace(BLOCKS, group_rows=1))
    whole = _load(joined)
    assert whole.scales.shape == (-(-sum(rows) // 32) if shared else sum(rows), 2)
    assert torch.equal(whole.dequantize(), torch.cat([weight.dequantize() for weight in weights]))


@pytest.mark.parametrize("rows", [32, 40])
def test_experts_of_gate_and_up(rows: int) -> None:
    made = [[_part(rows, 2 * expert + half) for half in (0, 1)] for expert in range(3)]
    stacked = stack([join_rows([part for part, _ in pair]) for pair in made])
    assert stacked.spec.shape == (3, 2 * rows, 64)
    whole = _load(stacked)
    wanted = torch.stack([torch.cat([weight.dequantize() for _, weight in pair]) for pair in made])
    assert torch.equal(whole.dequantize(), wanted)


def test_offsets_of_other_widths_are_joined() -> None:
    """Exact offsets need float32 in one piece and 16 bits in another."""
    scheme = QuantScheme("gptq4", Packing.UINT4, 4, 32, offset=True)
    (first, one), (_, other) = _part(16, 1, scheme), _part(8, 2, scheme)
    assert one.offsets is not None
    assert other.offsets is not None
    wide = replace(other, offsets=other.offsets.float() + 1e-5)
    second = Part(WeightSpec(wide.shape, torch.float32, scheme), lambda: wide)
    whole = _load(join_rows([first, second]))
    assert torch.equal(whole.dequantize(), torch.cat((one.dequantize(), wide.dequantize())))
    stacked = _load(stack([first, Part(first.spec, lambda: replace(one, offsets=one.offsets.float() + 1e-5))]))
    assert stacked.offsets is not None
    assert stacked.offsets.dtype is torch.float32


def test_unlike_schemes_become_plain() -> None:
    first, one = _part(32, 1)
    second, other = _part(32, 2, replace(BLOCKS, rounding=None))
    joined = join_rows([first, second])
    assert joined.spec.scheme is None
    pieces = joined.load()
    assert isinstance(pieces, Pieces)
    assert torch.equal(pieces.join(), torch.cat((one.dequantize(), other.dequantize())))
