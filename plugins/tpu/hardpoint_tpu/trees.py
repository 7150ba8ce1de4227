"""Trees of tensors as flat lists of JAX arrays and back: what a compiled function takes and gives.

    StepInputs(token_ids, plans=(plan,), sampling=...)  ->  [array, array ...] and the tree's form

Trees are dataclasses, tuples and lists. Whatever is no tensor is static and part of the form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any

import torch

#: Stands for a tensor in a form.
_TENSOR = "tensor"
#: A tree without its tensors. Equal for trees that differ in the numbers of their tensors alone.
Form = Hashable


def flatten(tree: Any, arrays: list[Any]) -> Form:
    """Append the arrays of the tree's tensors, in order; returns its form."""
    if isinstance(tree, torch.Tensor):
        arrays.append(tree._elem)  # type: ignore[attr-defined]
        return _TENSOR
    if isinstance(tree, (tuple, list)):
        return (tuple, *[flatten(part, arrays) for part in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        kind: Any = type(tree)
        return (kind, *[flatten(getattr(tree, name), arrays) for name in _fields(kind)])
    return (None, type(tree), tree)


def gather(tree: Any, arrays: list[Any]) -> None:
    """Append the arrays alone: what is left to do per step once the form is known."""
    if isinstance(tree, torch.Tensor):
        arrays.append(tree._elem)  # type: ignore[attr-defined]
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            gather(part, arrays)
    elif dataclasses.is_dataclass(tree):
        kind: Any = type(tree)
        for name in _fields(kind):
            gather(getattr(tree, name), arrays)


def rebuild(form: Any, arrays: Iterator[Any], wrap: Callable[[Any], torch.Tensor]) -> Any:
    """The tree of a form, with the next arrays as its tensors. Lists come back as tuples."""
    if form is _TENSOR or form == _TENSOR:
        return wrap(next(arrays))
    kind, *parts = form
    if kind is None:
        return parts[1]
    values = [rebuild(part, arrays, wrap) for part in parts]
    return tuple(values) if kind is tuple else kind(**dict(zip(_fields(kind), values, strict=True)))


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
