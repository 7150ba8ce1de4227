"""Numbers of a step that follow its size: found by recording it at two sizes.

A number that is alike in both recordings is fixed; one that grew as the tokens did counts tokens; likewise draws. Any
other makes the step unrecordable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint_cpu.native.abi import RowsOf
from hardpoint_cpu.native.recording import NativeCall, Place, Recording, SampleCall, TorchCall, Unrecordable, View


@dataclass(frozen=True)
class StepSize:
    """Tokens and draws of a step."""

    tokens: int
    draws: int


#: Sizes at which a step is recorded. Primes, so that one is not taken for another.
FIRST, SECOND = StepSize(211, 103), StepSize(223, 101)


@dataclass(frozen=True)
class Dim:
    """`unit`, times the tokens or draws of the step."""

    unit: int
    of: RowsOf = RowsOf.FIXED

    def at(self, size: StepSize) -> int:
        """The number in a step of this size."""
        if self.of is RowsOf.FIXED:
            return self.unit
        return self.unit * (size.tokens if self.of is RowsOf.TOKENS else size.draws)


@dataclass(frozen=True)
class SizedView:
    """A tensor over a storage whose sizes, strides and offset (bytes) follow the step."""

    storage: int
    offset: Dim
    dtype: torch.dtype
    size: tuple[Dim, ...]
    stride: tuple[Dim, ...]


@dataclass(frozen=True)
class SizedCall:
    """A native call: `rows` follow the step, all else is fixed."""

    call: NativeCall
    rows: Dim


@dataclass(frozen=True, eq=False)
class SizedTorchCall:
    """`args` and `kwargs` hold Dim and SizedView where sizes and tensors stood."""

    call: TorchCall
    args: Any
    kwargs: Any
    results: tuple[SizedView, ...]


@dataclass(frozen=True, eq=False)
class SizedSample:
    """The draw."""

    call: SampleCall
    logits: SizedView


SizedEntry = SizedCall | SizedTorchCall | SizedSample


@dataclass(frozen=True, eq=False)
class SizedStep:
    """A step of any size: entries in order, and the bytes of each storage."""

    entries: tuple[SizedEntry, ...]
    storages: tuple[Dim, ...]


def compare(first: Recording, second: Recording) -> SizedStep:
    """Put two recordings of one step, at FIRST and SECOND, together. Raises Unrecordable where they do not fit."""
    if len(first.entries) != len(second.entries) or len(first.storages) != len(second.storages):
        raise Unrecordable("which ops run depends on the size of the step")
    entries = tuple(_entry(a, b) for a, b in zip(first.entries, second.entries, strict=True))
    return SizedStep(entries, _dims(first.storages, second.storages))


def dim_of(first: int, second: int) -> Dim:
    """What a number means that was `first` at FIRST and `second` at SECOND."""
    if first == second:
        return Dim(first)
    for of, name in ((RowsOf.TOKENS, "tokens"), (RowsOf.DRAWS, "draws")):
        small, large = getattr(FIRST, name), getattr(SECOND, name)
        if first % small == 0 and first // small * large == second:
            return Dim(first // small, of)
    raise Unrecordable(f"{first} at {FIRST} and {second} at {SECOND} follow neither tokens nor draws")


def _dims(first: Sequence[int], second: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(dim_of(a, b) for a, b in zip(first, second, strict=True))


def _entry(first: Any, second: Any) -> SizedEntry:
    if type(first) is not type(second):
        raise Unrecordable("which ops run depends on the size of the step")
    if isinstance(first, NativeCall):
        fixed = ("code", "pointers", "integers", "floats", "plan")
        for name in fixed:
            if getattr(first, name) != getattr(second, name):
                raise Unrecordable(f"{name} of {first.code.name} depend on the size of the step")
        return SizedCall(first, dim_of(first.rows, second.rows))
    if isinstance(first, SampleCall):
        return SizedSample(first, _view(first.logits, second.logits))
    if first.function is not second.function:
        raise Unrecordable("which ops run depends on the size of the step")
    results = tuple(_view(a, b) for a, b in zip(first.results, second.results, strict=True))
    return SizedTorchCall(first, _tree(first.args, second.args), _tree(first.kwargs, second.kwargs), results)


def _tree(first: Any, second: Any) -> Any:
    """Arguments of a torch op: containers are walked, whole numbers and views are compared."""
    if isinstance(first, View):
        return _view(first, second)
    if isinstance(first, dict):
        return {key: _tree(value, second[key]) for key, value in first.items()}
    if isinstance(first, (list, tuple)):
        return [_tree(a, b) for a, b in zip(first, second, strict=True)]
    if isinstance(first, int) and not isinstance(first, bool):
        return dim_of(first, second)
    same = first is second or (not isinstance(first, torch.Tensor) and first == second)
    if isinstance(first, torch.Tensor) and not same:
        same = bool(torch.equal(first, second))  # a constant that the step makes anew
    if not same:
        raise Unrecordable("arguments of torch ops depend on the size of the step")
    return first


def _view(first: View, second: View) -> SizedView:
    if first.place.storage != second.place.storage or len(first.size) != len(second.size):
        raise Unrecordable("which memory is used depends on the size of the step")
    offset = dim_of(first.place.offset, second.place.offset)
    sizes, strides = _dims(first.size, second.size), _dims(first.stride, second.stride)
    return SizedView(first.place.storage, offset, first.dtype, sizes, strides)


def places(entry: SizedEntry) -> set[int]:
    """Numbers of the storages that an entry touches."""
    if isinstance(entry, SizedCall):
        return {pointer.storage for pointer in entry.call.pointers if isinstance(pointer, Place)}
    if isinstance(entry, SizedSample):
        return {entry.logits.storage}
    found = {view.storage for view in entry.results}
    _collect((entry.args, entry.kwargs), found)
    return found


def _collect(value: Any, found: set[int]) -> None:
    if isinstance(value, SizedView):
        found.add(value.storage)
    elif isinstance(value, dict):
        for part in value.values():
            _collect(part, found)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _collect(part, found)
