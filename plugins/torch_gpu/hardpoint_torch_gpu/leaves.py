"""The tensors of a step's inputs, in a fixed order, whatever dataclasses and tuples hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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


def mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tree with every tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(mapped(item, change) for item in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = {field.name: mapped(getattr(tree, field.name), change) for field in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **parts)
    return tree
