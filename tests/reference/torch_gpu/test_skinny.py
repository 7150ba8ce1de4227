"""Products of a few rows: every number of rows, tails, split columns, biases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hardpoint_torch_gpu.few_rows import FewRows
from hardpoint_torch_gpu.kernels import skinny as kernels
from hardpoint_torch_gpu.kernels.skinny import MOST, skinny

pytestmark = pytest.mark.reference


def _made(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def _close(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    wanted = F.linear(x.float(), w.float(), None if bias is None else bias.float())
    assert got.dtype is x.dtype
    assert got.shape == wanted.shape
    assert torch.allclose(got.float(), wanted, rtol=2e-3, atol=0.05)


@pytest.mark.parametrize("tokens", [2, 16, 17, 33, MOST])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (70, 200)])
def test_every_height(tokens: int, rows: int, columns: int) -> None:
    x, w = _made(tokens, columns, seed=1), _made(rows, columns, seed=2)
    _close(skinny(x, w, None), x, w, None)


def test_columns_are_split_and_locks_end_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than tiles, the last of which has fewer columns than the others."""
    monkeypatch.setattr(kernels, "processors", lambda device: 6)
    x, w, bias = _made(3, 1500, seed=3), _made(128, 1500, seed=4), _made(128, seed=5)
    for _ in range(2):
        _close(skinny(x, w, bias), x, w, bias)
    assert not kernels._locks(x.device).any()


def test_which_products_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = kernels.skinny
    monkeypatch.setattr("hardpoint_torch_gpu.few_rows.skinny", lambda x, w, b: taken.append(len(x)) or real(x, w, b))
    w = _made(32, 48, seed=6)
    few = FewRows()
    for shape in ((0, 48), (1, 48), (2, 48), (3, 5, 48), (MOST, 48), (MOST + 1, 48)):
        x = _made(*shape, seed=7)
        _close(few.product(x, w, None), x, w, None)
    narrow = _made(4, 96, seed=8)[:, ::2]
    _close(few.product(narrow, w, None), narrow, w, None)
    few.product(torch.randn(2, 48), w.float(), None)
    assert taken == [2, 15, MOST, 4]
