"""The tensors of a step's inputs, in a fixed order, whatever dataclasses and tuples hold them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def leaves(tree: Any) -> list[torch.Tensor]:
    """Every tensor, depth first."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, tuple | list):
        for item in tree:
            _collect(item, found)
    elif dataclasses.is_dataclass(tree):
        for value in vars(tree).values():
            _collect(value, found)
