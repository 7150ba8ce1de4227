"""Trees of tensors: dataclasses, tuples and lists, as steps, plans and samples are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tree with every tensor changed; what is no tensor stays as it is, and lists come back as tuples."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        return tuple(mapped(part, change) for part in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = {field.name: mapped(getattr(tree, field.name), change) for field in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **parts)
    return tree
