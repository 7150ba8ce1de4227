"""Where scales lie on a weight: one for all of it, one per row, per group of columns, or per block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hardpoint.weights.quantized.method import SCALE_DTYPES, Stored, columns_in_groups

Block = tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """Columns and rows that share a scale, as `QuantScheme` has them."""

    group: int
    group_rows: int


def grid_of(stored: Stored, shape: tuple[int, ...], block: Block | None) -> Grid:
    """The grid of a weight [..., rows, columns].

    block: rows and columns per scale; None: the scales' own shape says whether there is one per row or one for all.
    Raises WeightsError where the scales are missing or of a shape that does not fit.
    """
    *lead, rows, columns = shape
    if block is None:
        each = tuple(lead)
        wanted = [(*each, rows, 1), (*each, rows), (*each, 1, 1), (*each, 1), each, (1,) * len(shape), (1,), ()]
        stored.expect("scales", SCALE_DTYPES, *wanted)
        return Grid(columns, 1)
    group, group_rows = columns_in_groups(stored, columns, block[1]), block[0]
    stored.expect("scales", SCALE_DTYPES, (*lead, -(-rows // group_rows), columns // group))
    return Grid(group, group_rows)


def scales_on(stored: Stored, shape: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The scales as `QuantTensor` wants them: [..., ceil(rows / group_rows), columns // group]."""
    scales = stored.load("scales")
    return on_grid(scales.to(torch.float32) if scales.dtype is torch.float8_e8m0fnu else scales, shape, grid)


def on_grid(part: torch.Tensor, shape: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """One number per scale, laid out as `QuantTensor` has scales. One of all rows is repeated for each."""
    *lead, rows, columns = shape
    full = (*lead, -(-rows // grid.group_rows), columns // grid.group)
    if part.numel() == math.prod(full):
        return part.reshape(full)
    return part.reshape((*lead, 1, 1) if part.numel() > 1 else (1,) * len(full)).expand(full).contiguous()
