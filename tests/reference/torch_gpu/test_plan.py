"""How rows are cut for the GPU: every key in one part, parts of like size, as many as were announced."""

from __future__ import annotations

import numpy as np
import pytest
from hardpoint_torch_gpu.plan import BLOCK, TILE, cut, tiles
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.reference


@given(st.lists(st.integers(0, 5000), max_size=80), st.booleans())
def test_parts_hold_every_key_once(lengths: list[int], fixed: bool) -> None:
    rows, tokens = np.arange(len(lengths)) + 3, np.arange(len(lengths)) + 7
    parts = cut(rows, tokens, np.asarray(lengths, np.int32), fixed=fixed)
    if fixed and lengths:
        assert len(parts) == 2 * len(lengths) + 64
    real = parts[parts[:, 0] >= 0]
    assert (parts[: len(real), 0] >= 0).all()
    at = 0
    for row, token, length in zip(rows, tokens, lengths, strict=True):
        keys = 0
        while at < len(real) and real[at, 0] == row:
            assert real[at, 1] == token
            assert real[at, 2] * real[at, 3] == keys  # parts of a row lie together and in order
            assert real[at, 3] % BLOCK == 0
            keys = min(keys + int(real[at, 3]), length)
            at += 1
        assert keys == length
    assert at == len(real)


def test_a_long_row_among_short_ones_does_not_hold_the_step_up() -> None:
    lengths = np.asarray([100] * 60 + [6000], np.int32)
    parts = cut(np.arange(61), np.arange(61), lengths, fixed=True)
    assert parts[:, 3].max() <= 3 * BLOCK * 2
    assert (parts[:, 0] == 60).sum() > 20


def test_rows_of_like_length_are_not_cut_where_they_fill_the_gpu() -> None:
    parts = cut(np.arange(256), np.arange(256), np.full(256, 1000, np.int32), fixed=True)
    assert (parts[:, 0] >= 0).sum() == 256


def test_tiles_with_most_keys_come_first() -> None:
    rows, firsts = tiles(np.asarray([1, 300, 2]), np.asarray([9, 300, 900]))
    assert (rows.tolist(), firsts.tolist()) == ([2, 1, 1, 1], [0, 2 * TILE, TILE, 0])
