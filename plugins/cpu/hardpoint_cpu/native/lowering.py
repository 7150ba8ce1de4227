"""Torch ops that move rows, as native ops: so that a step with a few of them stays one tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.pointwise import add_rows, copy_rows, gather_rows
from hardpoint_cpu.native.stage import Stage

#: Copies of [rows, heads, width] take one native op per head; beyond this torch does it.
_MOST_COPIES = 64


def lower(stage: Stage, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The result of `function` by native ops, or None where there is no such way."""
    rule = _RULES.get(function._schema.name)
    return None if rule is None else rule(stage, args, kwargs)


def _is_rows(x: Any) -> bool:
    """float32 [rows, width], neighbours side by side, without memory yet."""
    return isinstance(x, torch.Tensor) and x.is_meta and x.dtype is torch.float32 and x.dim() == 2 and x.stride(1) == 1


def _gather(stage: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    if len(args) != 3:
        return None
    source, dim, index = args
    if not (_is_rows(source) and dim in (0, -2) and index.is_meta and index.dtype is torch.int64):
        return None
    if not (stage.library.has(Code.GATHER) and index.is_contiguous()):
        return None
    out = torch.empty((index.shape[0], source.shape[1]), device="meta")
    gather_rows(stage, source, index, out)
    return out


def _add(stage: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    if len(args) != 2:
        return None
    a, b = args
    same = _is_rows(a) and _is_rows(b) and a.shape == b.shape and a.is_contiguous() and b.is_contiguous()
    if not same or kwargs.get("alpha", 1) != 1 or not stage.library.has(Code.ADD):
        return None
    out = torch.empty(a.shape, device="meta")
    add_rows(stage, a, b, out)
    return out


def _cat(stage: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if dim not in (1, -1) or not all(_is_rows(part) for part in parts) or not stage.library.has(Code.COPY):
        return None
    out = torch.empty((parts[0].shape[0], sum(part.shape[1] for part in parts)), device="meta")
    start = 0
    for part in parts:
        copy_rows(stage, part, out[:, start : start + part.shape[1]])
        start += part.shape[1]
    return out


def _clone(stage: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    x = args[0]
    if not (isinstance(x, torch.Tensor) and x.is_meta and x.dtype is torch.float32 and stage.library.has(Code.COPY)):
        return None
    wanted = kwargs.get("memory_format", torch.preserve_format)
    if wanted is not torch.contiguous_format and not (wanted is torch.preserve_format and x.is_contiguous()):
        return None
    out = torch.empty(x.shape, device="meta")
    if x.dim() == 3 and x.stride(0) == x.shape[1] * x.stride(1):  # heads of all rows are evenly spaced
        parts, targets = [x.flatten(0, 1)], [out.flatten(0, 1)]
    elif x.dim() == 3:
        parts, targets = list(x.unbind(1)), list(out.unbind(1))
    else:
        parts, targets = [x], [out]
    if len(parts) > _MOST_COPIES or not all(_is_rows(part) for part in parts):
        return None
    for part, target in zip(parts, targets, strict=True):
        copy_rows(stage, part, target)
    return out


_RULES: Mapping[str, Callable[[Stage, tuple[Any, ...], Mapping[str, Any]], torch.Tensor | None]] = {
    "aten::index_select": _gather,
    "aten::add": _add,
    "aten::cat": _cat,
    "aten::clone": _clone,
}
