"""Running a step once without computing it, to learn which ops it consists of and which memory they touch.

Tensors of the step live on torch's meta device: they have shapes, strides and storages, and no data. Whoever reads data
(a kernel that looks at the plan, `.item()`) makes the recording impossible, and finds that out by an exception.

    native kernel  -> Stage.call -> Recording.native          one entry
    torch op       -> Recording.__torch_dispatch__            a view: nothing; an allocation: a storage; rows copied,
                                                              added, gathered: native entries; else a TorchCall
    sample         -> Recording.sample                        the last entry
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.lowering import lower
from hardpoint_cpu.native.stage import Pointer, Stage
from hardpoint_platforms.batch import SampleResult

_ALLOCATIONS = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)


class Unrecordable(Exception):
    """The step does something that a tape cannot repeat."""


class Unreadable:
    """Stands where a value of the live step will be; to look at it is to depend on it."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise Unrecordable(f"{self._what} are read between native ops (.{name})")


@dataclass(frozen=True)
class PlanSlot:
    """Stands for the native plan at this place of the step's plans."""

    index: int


@dataclass(frozen=True)
class Place:
    """Bytes from the start of the recording's storage number `storage`."""

    storage: int
    offset: int


@dataclass(frozen=True)
class View:
    """A tensor over a storage."""

    place: Place
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class NativeCall:
    """One hp_op. Pointers are places, or addresses of what outlives the step; `plan` is -1 for none."""

    code: Code
    rows: int
    pointers: tuple[Place | int, ...]
    integers: tuple[int, ...]
    floats: tuple[float, ...]
    plan: int


@dataclass(frozen=True, eq=False)
class TorchCall:
    """An op of torch's that is called anew each time, its results copied to `results`."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[View, ...]


@dataclass(frozen=True, eq=False)
class SampleCall:
    """The draw, whose parameters change from step to step."""

    kernel: Callable[..., SampleResult]
    logits: View


Entry = NativeCall | TorchCall | SampleCall


class Recording(TorchDispatchMode):
    """What one run of a step did. `entries` in order; `storages` in bytes; `constants` are kept alive by the tape."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stage = stage
        self.entries: list[Entry] = []
        self.storages: list[int] = []
        self.constants: list[torch.Tensor] = []
        self.drawn: SampleResult | None = None
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # so that no address stands for two storages

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the guard that torch would put around __torch_dispatch__ imports its compiler, which takes seconds."""
        return False

    def input(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that is filled before each run."""
        made = torch.empty(shape, dtype=dtype, device="meta")
        self._number(made)
        return made

    def native(
        self,
        code: Code,
        rows: int,
        pointers: Sequence[Pointer],
        integers: Sequence[int],
        floats: Sequence[float],
        plan: object,
    ) -> None:
        """Note one native op."""
        if self.drawn is not None:
            raise Unrecordable("native ops behind the draw")
        if plan is not None and not isinstance(plan, PlanSlot):
            raise Unrecordable(f"{code.name} got a plan that is not the step's")
        index = plan.index if isinstance(plan, PlanSlot) else -1
        places = tuple(self._pointer(pointer) for pointer in pointers)
        self.entries.append(NativeCall(code, rows, places, tuple(integers), tuple(floats), index))

    def sample(self, kernel: Callable[..., SampleResult], logits: torch.Tensor) -> SampleResult:
        """Note the draw; returns stand-ins for its results."""
        if self.drawn is not None or not logits.is_meta:
            raise Unrecordable("more than one draw in a step")
        self.entries.append(SampleCall(kernel, self._view(logits)))
        rows = logits.shape[0]
        ids = torch.empty(rows, dtype=torch.int64, device="meta")
        self.drawn = SampleResult(ids, finite=torch.empty(rows, dtype=torch.bool, device="meta"))
        return self.drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs.values())]
        if given and not any(tensor.is_meta for tensor in given):
            if func._schema.is_mutable:
                raise Unrecordable(f"{func} writes what outlives the step")
            return func(*args, **kwargs)  # of constants alone: a constant
        lowered = lower(self._stage, func, args, kwargs)
        if lowered is not None:
            return lowered
        return self._torch(func, args, kwargs, given)

    def _torch(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        if func._schema.name in _ALLOCATIONS or _is_view(func):
            return func(*args, **(kwargs if given else {**kwargs, "device": torch.device("meta")}))
        if self.drawn is not None:
            raise Unrecordable(f"{func} behind the draw")
        if not _fixed_shape(func, given):
            raise Unrecordable(f"{func} reads data to find its result's shape")
        # Shapes come from a run on zeros: torch's own rules for meta tensors import its compiler.
        solid = {id(tensor): _zeros_like(tensor) if tensor.is_meta else tensor for tensor in given}
        if any(not tensor.is_meta for tensor in _written(func, args, kwargs)):
            raise Unrecordable(f"{func} writes what outlives the step")

        def real(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return solid[id(value)] if isinstance(value, torch.Tensor) else value

        result = func(*tree_map(real, args), **tree_map(real, kwargs))
        back = {id(solid[id(tensor)]): tensor for tensor in given}
        fresh: list[torch.Tensor] = []

        def bare(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in back:
                fresh.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))
                back[id(value)] = fresh[-1]
            elif fresh:
                raise Unrecordable(f"{func} returns old memory and new")
            return back[id(value)]

        bared = tree_map(bare, result)
        results = tuple(self._view(tensor) for tensor in fresh)
        arguments = tree_map(self._argument, args), tree_map(self._argument, kwargs)
        self.entries.append(TorchCall(func, *arguments, results))
        return bared

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:
            return self._view(value)
        self.constants.append(value)
        return value

    def _pointer(self, pointer: Pointer) -> Place | int:
        if pointer is None or isinstance(pointer, int):
            return pointer or 0
        if pointer.is_meta:
            return self._place(pointer)
        self.constants.append(pointer)
        return pointer.data_ptr()

    def _view(self, tensor: torch.Tensor) -> View:
        return View(self._place(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def _place(self, tensor: torch.Tensor) -> Place:
        return Place(self._number(tensor), int(tensor.storage_offset()) * tensor.element_size())

    def _number(self, tensor: torch.Tensor) -> int:
        found = self._numbers.get(storage_of(tensor))
        if found is None:
            storage = tensor.untyped_storage()
            found = self._numbers[storage_of(tensor)] = len(self.storages)
            self.storages.append(storage.nbytes())
            self._alive.append(storage)
        return found


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among an op's arguments, which are tensors, numbers and lists of them: torch's own walk takes longer."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_view(func: Any) -> bool:
    """Whether results are the arguments' memory, unchanged."""
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that `func` writes into."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    targets = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return list(_tensors(named.get(name) for name in targets))


def _fixed_shape(func: Any, given: list[torch.Tensor]) -> bool:
    """Whether the result's shape follows from the arguments' shapes alone."""
    if func._schema.name == "aten::index":
        return not any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors over the same memory share."""
    return int(tensor.untyped_storage()._cdata)
