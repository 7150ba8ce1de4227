"""Looks at every torch op of a step and forbids what a whole-program compiler cannot do.

Under `torch.inference_mode` composite ops arrive whole, so that both they and what they are made of are named here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hardpoint_platforms.strict.errors import (
    DynamicShape,
    ForbiddenWrite,
    ForeignTensor,
    HiddenRandomness,
    HostReadBack,
)
from hardpoint_platforms.strict.journal import Journal

_READ = {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"}
_DYNAMIC = {
    "nonzero": "torch.where(mask, x, 0) over all places",
    "nonzero_numpy": "torch.where(mask, x, 0) over all places",
    "argwhere": "torch.where(mask, x, 0) over all places",
    "masked_select": "torch.where(mask, x, 0) over all places",
    "bincount": "scatter_add into a tensor of fixed size",
    "unique_dim": "a sort, and a mask of the first of equals",
    "_unique": "a sort, and a mask of the first of equals",
    "_unique2": "a sort, and a mask of the first of equals",
    "unique_consecutive": "a comparison with the place before",
}
_READ_ADVICE = "keep the value in a tensor (torch.where, gather, clamp), or make it a static attribute of the op"
_SEEDS_ADVICE = "draw from inputs.sampling.seeds and positions, as reference/draw.py does"
#: Ops that draw only where this argument is not 0.
_SWITCH = {"dropout": "train", "feature_dropout": "train", "scaled_dot_product_attention": "dropout_p"}
#: Mutable by their schema, but they change no data.
_HARMLESS = {"detach_", "resolve_conj", "lift_fresh"}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Watch(TorchDispatchMode):
    """Entered for one run of a step."""

    def __init__(self, journal: Journal, protected: Mapping[int, str]) -> None:
        """`protected`: by storage, the names of the step's inputs, weights and state."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._journal, self._protected = journal, protected
        self._views: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        name, suspicious, writes = _facts(func)
        given = list(_tensors((args, kwargs)))
        if suspicious:
            self._check_values(func, name, args, kwargs)
        self._check_device(name, given)
        if writes:
            self._check_writes(func, name, args, kwargs)
        made = func(*args, **kwargs)
        if name == "lift_fresh" and isinstance(made, FakeTensor):
            made.constant = None  # else the trace computes with the number itself, on a device that no build has
        self._note(name, given, made)
        return made

    def _check_values(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        tags, where = func.tags, self._journal.where
        if torch.Tag.nondeterministic_seeded in tags and _argument(func, _SWITCH.get(name, ""), args, kwargs) != 0:
            raise HiddenRandomness(f"random generator: {name} at {where()}: {_SEEDS_ADVICE}")
        if name in _READ or torch.Tag.data_dependent_output in tags:
            raise HostReadBack(f"host read-back: {name} at {where()}: {_READ_ADVICE}")
        if name in _INDEXING:
            if any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
                told = "torch.where(mask, value, x) over all places"
                raise DynamicShape(f"data-dependent shape: {name} with a mask at {where()}: write {told}")
            return
        lengths = name == "repeat_interleave" and func._overloadname in ("Tensor", "self_Tensor")
        if lengths:
            told = "index_select with indices of fixed size"
            raise DynamicShape(f"data-dependent shape: {name} with lengths at {where()}: write {told}")
        if name == "where" and len(args) == 1:
            name = "nonzero"
        if name in _DYNAMIC or torch.Tag.dynamic_output_shape in tags:
            told = _DYNAMIC.get(name, "an op whose shape follows from shapes alone")
            raise DynamicShape(f"data-dependent shape: {name} at {where()}: write {told}")

    def _check_device(self, name: str, given: list[torch.Tensor]) -> None:
        """While a step is traced its tensors are on a device that is not the host."""
        traced = [x for x in given if isinstance(x, FakeTensor)]
        if not any(x.device.type != "cpu" for x in traced):
            return
        for x in given:
            if not isinstance(x, FakeTensor):
                told = "pass it to the step as a weight or an input"
            elif x.device.type == "cpu" and x.dim() and name != "lift_fresh":
                told = "make it with device=x.device"
            else:
                continue
            what = f"a tensor {list(x.shape)} that the step was not given or that was made on the host"
            raise ForeignTensor(f"foreign tensor: {name} meets {what} at {self._journal.where()}: {told}")

    def _check_writes(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        where = self._journal.where
        call = self._journal.call
        for target in _written(func, args, kwargs):
            storage = target.untyped_storage()._cdata
            owner = self._protected.get(storage)
            if owner is not None:
                told = "return a new tensor"
                raise ForbiddenWrite(f"write in place: {name} changes {owner} at {where()}: {told}")
            if target in self._views:
                told = "write into the tensor itself by index, or return a new one"
                via = self._views[target]
                raise ForbiddenWrite(f"write through a view: {name} after {via} at {where()}: {told}")
            if call is None:
                told = "model code returns new tensors; only an op may write into a buffer of its own"
                raise ForbiddenWrite(f"write in place: {name} at {where()}: {told}")
            if storage not in call.made:
                told = "only a buffer that the op made itself may be written"
                raise ForbiddenWrite(f"write in place: {name} changes an argument of the op at {where()}: {told}")

    def _note(self, name: str, given: list[torch.Tensor], made: Any) -> None:
        call, inputs = self._journal.call, {id(x) for x in given}
        storages = {x.untyped_storage()._cdata for x in given}
        traced = any(isinstance(x, FakeTensor) and x.device.type != "cpu" for x in given)
        for x in _tensors(made):
            if id(x) in inputs:
                continue
            storage = x.untyped_storage()._cdata
            if storage in storages:
                self._views[x] = name
            elif call is not None:
                call.made.add(storage)
            if traced and x.device.type == "cpu":
                where = self._journal.where()
                raise HostReadBack(f"host read-back: {name} copies a tensor to the host at {where}: {_READ_ADVICE}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


@functools.cache
def _facts(func: Any) -> tuple[str, bool, bool]:
    """Name of an op, whether its values need a look, whether it writes."""
    name = func._schema.name.partition("::")[2]
    looked_at = name in _READ or name in _DYNAMIC or name in _INDEXING or name in ("where", "repeat_interleave")
    return name, looked_at or not _TAGS.isdisjoint(func.tags), func._schema.is_mutable and name not in _HARMLESS


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that a call writes into, by its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))


def _argument(func: Any, wanted: str, args: Any, kwargs: Any) -> Any:
    """The value that an argument has in a call, None where the op has no such argument."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == wanted:
            return args[place] if place < len(args) else kwargs.get(wanted, argument.default_value)
    return None
