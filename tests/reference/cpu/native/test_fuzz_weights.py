"""Matrices that nobody would make: random kinds, odd sizes, bytes that are no numbers, and rules that contradict.

Each is refused, or packed and multiplied without touching a byte that is not its own; `make sanitize` would see
that. Buffers are exactly as large as the matrix needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from hardpoint.weights.gguf.ggml_types import GGML_TYPES, GgmlType
from hardpoint.weights.gguf.quants import convert, scheme_of
from hardpoint_cpu.native.abi import Code, Matrix
from hardpoint_cpu.native.stage import Stage
from hardpoint_cpu.native.weights import matrix_of

pytestmark = pytest.mark.reference

SEEDS, MATRICES_PER_SEED = 8, 60
F32, F16, BF16, I8, U8 = range(5)
WIDTHS = {F32: 4, F16: 2, BF16: 2, I8: 1, U8: 1}
BATCHES = (1, 5, 14)
Bytes = npt.NDArray[np.uint8]
QUANTIZED = [kind for kind in GGML_TYPES.values() if kind.usable and scheme_of(kind) is not None]


@dataclass
class Made:
    """A matrix and the buffers that it points into."""

    matrix: Matrix
    kept: list[Bytes]

    def point(self, name: str, size: int, dtype: int, rng: np.random.Generator) -> None:
        """Random bytes: with luck NaN, infinity and numbers too small to be normal."""
        self.kept.append(rng.integers(0, 256, size * WIDTHS.get(dtype, 4), dtype=np.uint8))
        setattr(self.matrix, name, self.kept[-1].ctypes.data)
        if name not in ("codebook",):
            setattr(self.matrix, f"{name}_dtype", dtype)


def made_up(rng: np.random.Generator) -> Made:
    """Any kind. Groups that do not divide the row, and levels without their scales, are for the library to refuse."""
    rows, columns, packing = int(rng.integers(1, 52)), int(rng.integers(1, 300)), int(rng.integers(3))
    if rng.random() < 0.6:
        columns = -(-columns // 32) * 32
    made = Made(Matrix(rows=rows, columns=columns, packing=packing), [])
    if packing == 0:
        made.point("values", rows * columns, int(rng.integers(4)), rng)
        return made
    group = int(rng.choice([16, 32, 32, 64, 128, 48, 1, 5, 0, -7, 1 << 40]))
    made.matrix.group, made.matrix.super_group = group, int(rng.choice([0, 1, 2, 3, 8, -1, 1 << 40]))
    made.point("values", rows * (columns if packing == 1 else -(-columns // 2)), I8, rng)
    groups = columns // group if 0 < group < columns else 1
    supers = -(-groups // made.matrix.super_group) if made.matrix.super_group > 0 else 1
    made.point("scales", rows * groups, int(rng.integers(5)), rng)
    if rng.random() < 0.5:
        made.point("offsets", rows * groups, int(rng.integers(5)), rng)
    if made.matrix.super_group > 0 and rng.random() < 0.7:
        made.point("super_scales", rows * supers, int(rng.integers(5)), rng)
        if made.matrix.offsets and rng.random() < 0.7:
            made.point("super_offsets", rows * supers, int(rng.integers(5)), rng)
    if rng.random() < 0.3:
        # Code points are a table of the program's, not of the file: numbers, but any.
        book = rng.standard_normal(256).astype(np.float32) * np.float32(10.0 ** rng.integers(-30, 30))
        made.kept.append(book.view(np.uint8))
        made.matrix.codebook = made.kept[-1].ctypes.data
    return made


def spoil(made: Made, rng: np.random.Generator) -> None:
    """One rule of the matrix broken."""
    name, values = [
        ("rows", (0, -1)),
        ("columns", (0, -5)),
        ("packing", (3, -1)),
        ("values", (0,)),
        ("scales_dtype", (5, -1, 1 << 30)) if made.matrix.packing else ("values_dtype", (3, 4, 9, -1)),
        ("scales", (0,)) if made.matrix.packing else ("values_dtype", (3, 5)),
    ][int(rng.integers(6))]
    setattr(made.matrix, name, values[int(rng.integers(len(values)))])


def multiply(stage: Stage, handle: int, x: npt.NDArray[np.float32], rows: int) -> npt.NDArray[np.float32]:
    """The product, checked to be written where it belongs."""
    batch, columns = x.shape
    out = np.full((batch, rows + 1), 7, np.float32)
    pointers = (x.ctypes.data, handle, None, out.ctypes.data, None)
    stage.call(Code.LINEAR, batch, pointers, (columns, rows, columns, rows + 1))
    assert (out[:, rows] == 7).all()
    return out[:, :rows].copy()


def run(stage: Stage, made: Made, rng: np.random.Generator) -> bool:
    """Pack in both modes and multiply; whether the library took the matrix."""
    taken = False
    for exact in (0, 1):
        handle = stage.library.c.hp_weight_new(stage.pool.handle, ctypes.addressof(made.matrix), exact)
        if not handle:
            continue
        taken = True
        rows, columns = made.matrix.rows, made.matrix.columns
        assert stage.library.c.hp_weight_bytes(handle) >= rows * columns // 2
        assert stage.library.c.hp_weight_layout(handle)
        x = rng.standard_normal((max(BATCHES), columns)).astype(np.float32)
        x[3, rng.integers(columns)] = (np.nan, np.inf, 3e38, 1e-40)[int(rng.integers(4))]
        whole = multiply(stage, handle, x, rows)
        for batch in BATCHES[:-1]:
            few = multiply(stage, handle, x[:batch].copy(), rows)
            assert np.array_equal(few, whole[:batch], equal_nan=True)
        stage.library.c.hp_weight_free(handle)
    return taken


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_matrices(seed: int, any_stage: Stage) -> None:
    rng, taken = np.random.default_rng(seed), 0
    for _ in range(MATRICES_PER_SEED):
        taken += run(any_stage, made_up(rng), rng)
    assert MATRICES_PER_SEED // 3 < taken < MATRICES_PER_SEED


@pytest.mark.parametrize("seed", range(2))
def test_broken_matrices_are_refused(seed: int, stages: Callable[[int], Stage]) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(MATRICES_PER_SEED):
        made = made_up(rng)
        spoil(made, rng)
        assert not run(stages(2), made, rng)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_blocks_of_random_bytes(kind: GgmlType, any_stage: Stage) -> None:
    """As a damaged file gives them: scales of any bits."""
    rng = np.random.default_rng(kind.number)
    for rows, blocks in ((1, 1), (3, 2), (17, 3), (33, 1)):
        data = rng.integers(0, 256, rows * blocks * kind.bytes, dtype=np.uint8)
        with np.errstate(all="ignore"):
            weight = convert(kind, (rows, blocks * kind.block), data)
        matrix, kept = matrix_of(weight)
        assert run(any_stage, Made(matrix, []), rng)
        del kept
