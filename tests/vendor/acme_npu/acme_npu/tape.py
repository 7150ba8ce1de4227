"""A recorded step: the device calls it made, in order, with every value they pass on by number.

    call 0   index_select   (input 3, weight)          -> value 0
    call 1   attend         (value 0, cache, input 5)   -> value 1, value 2

Inputs are fixed buffers; weights and cache are those of the recording. Playing runs the calls, and none of the Python
that made them. Values are dropped after their last use; what they take at most is reserved for as long as the tape is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from acme_npu.memory import CHIP, AcmeTensor, Block
from acme_npu.tree import leaves, mapped

#: Their results have as many rows as the data say: a fixed program cannot hold them.
_DATA_DEPENDENT = ("nonzero", "masked_select", "_unique2", "bincount")


@dataclass(frozen=True)
class Value:
    """Stands in a call's arguments for what an earlier call returned."""

    number: int


@dataclass
class Call:
    """One call; `drop` are the values that nobody reads after it."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    host: bool
    drop: tuple[int, ...] = ()


@dataclass
class Tape:
    """Filled by `Chip.launch` while it is the chip's tape; `finish` makes it playable."""

    calls: list[Call] = field(default_factory=list)
    splits: Counter[str] = field(default_factory=Counter)
    why_not: str = ""
    _numbers: dict[int, int] = field(default_factory=dict)
    _seen: list[torch.Tensor] = field(default_factory=list)  # kept, so that no id is given twice
    _workspace: Block | None = None

    def check(self, function: Any) -> None:
        """Refuse torch ops that a fixed program cannot hold."""
        name = str(function.overloadpacket.__name__)
        if name in _DATA_DEPENDENT:
            self.refuse(name)

    def refuse(self, what: str) -> None:
        """Note that the step cannot be repeated. It runs on to its end: it has changed the state."""
        self.why_not = self.why_not or f"{what} cannot be captured"

    def add(self, function: Any, name: str, args: Any, kwargs: Any, result: Any, host: bool) -> None:
        """A call that was just made."""
        given, named = mapped(args, self._value), mapped(kwargs, self._value)
        numbers = []
        for tensor in leaves(result):
            number = self._numbers.setdefault(id(tensor), len(self._seen))
            self._seen.append(tensor)
            numbers.append(number)
        self.calls.append(Call(function, given, named, tuple(numbers), host))
        if host:
            self.splits[name] += 1

    def finish(self, outputs: Any) -> Any:
        """Forget the recorded bytes. Returns the step's outputs with values in place of tensors."""
        kept = mapped(outputs, self._value)
        last: dict[int, int] = {}
        for place, call in enumerate(self.calls):
            last.update(dict.fromkeys((*call.results, *_numbers(call.args), *_numbers(call.kwargs)), place))
        alive = set(_numbers(kept))
        for number, place in last.items():
            if number not in alive:
                self.calls[place].drop += (number,)
        self._workspace = Block(CHIP, self._peak())
        self._numbers.clear()
        self._seen.clear()
        return kept

    def play(self, outputs: Any) -> Any:
        """Make the calls. Returns `outputs` with tensors in place of values."""
        values: dict[int, torch.Tensor] = {}
        for call in self.calls:
            result = call.function(*_filled(call.args, values), **_filled(call.kwargs, values))
            values.update(zip(call.results, leaves(result), strict=True))
            for number in call.drop:
                del values[number]
        return _filled(outputs, values)

    def describe(self) -> str:
        """For people."""
        said = f"{len(self.calls)} captured calls"
        ops = ", ".join(f"{count} x {name}" for name, count in self.splits.most_common())
        return f"{said}, split by {self.splits.total()} host calls: {ops}" if ops else said

    def _value(self, tensor: torch.Tensor) -> Any:
        inner = tensor.inner if isinstance(tensor, AcmeTensor) else tensor
        number = self._numbers.get(id(inner))
        return inner if number is None else Value(number)

    def _peak(self) -> int:
        """Most bytes that values hold at once; a view counts nothing beside its base."""
        held: dict[int, int] = {}
        storages: dict[int, int] = {}
        most = 0
        for call in self.calls:
            for number in call.results:
                storage = self._seen[number].untyped_storage()
                fresh = storages.setdefault(storage._cdata, number) == number
                held[number] = storage.nbytes() if fresh else 0
            most = max(most, sum(held.values()))
            for number in call.drop:
                held.pop(number)
        return most


def _numbers(value: Any) -> list[int]:
    return [stand_in.number for stand_in in leaves(value, Value)]


def _filled(value: Any, values: dict[int, torch.Tensor]) -> Any:
    return mapped(value, lambda stand_in: values[stand_in.number], Value)
