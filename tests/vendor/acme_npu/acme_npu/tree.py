"""Walking over what kernels take and return: tuples, lists, dicts and dataclasses with tensors in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


def mapped(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """`value` with `change` applied to every `kind` in it."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = [mapped(part, change, kind) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {name: mapped(part, change, kind) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: mapped(getattr(value, name), change, kind) for name in names})
    return value


def leaves(value: Any, kind: type = torch.Tensor) -> Iterator[Any]:
    """Every `kind` in `value`, in a fixed order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from leaves(part, kind)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()), kind)
    elif dataclasses.is_dataclass(value):
        yield from leaves([getattr(value, field.name) for field in dataclasses.fields(value)], kind)


def shape_of(value: Any) -> Any:
    """What must be alike in two values for one recording to serve both; hashable."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(shape_of(part) for part in value)
    if dataclasses.is_dataclass(value):
        return type(value), tuple(shape_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value
