"""The chip's memory and the tensors that live in it.

    AcmeTensor            what the engine holds: shape, dtype, device "acme", no data that the host could read
      .inner              its bytes in the arena, for kernels alone
      .block              the reservation that these bytes count against; views share their base's

Whatever is done to an AcmeTensor ends in `Chip.launch`: kernels of this plugin, and torch's own ops, which reach it
through __torch_dispatch__ (a real vendor's torch backend would implement them on the chip).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import backend_registration

from acme_npu.tree import leaves, mapped
from hardpoint_platforms.errors import OutOfDeviceMemory, PlatformError

if TYPE_CHECKING:
    from acme_npu.tape import Tape

ALIGNMENT = 512
aten = torch.ops.aten
_READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
_TO_HOST = "Device.to_host(tensor)"


class HostAccess(PlatformError):
    """The host reached for bytes that are not its own."""


class Block:
    """Bytes reserved in the arena until nobody holds the block."""

    def __init__(self, chip: Chip, size: int) -> None:
        self.size = -(-size // ALIGNMENT) * ALIGNMENT
        chip.reserve(self.size)
        weakref.finalize(self, chip.release, self.size)


class AcmeTensor(torch.Tensor):
    """A tensor in the chip's memory. Made by `Chip.wrap` alone."""

    inner: torch.Tensor  # type: ignore[assignment]  # hides an op that nobody calls as a method
    block: Block
    # Ops go to __torch_dispatch__; nothing is done before.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[AcmeTensor], inner: torch.Tensor, block: Block) -> AcmeTensor:
        made: AcmeTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner, made.block = inner, block
        return made

    def __init__(self, inner: torch.Tensor, block: Block) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return CHIP.torch_op(function, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AcmeTensor({list(self.shape)}, {self.dtype}; read it with {_TO_HOST})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def numpy(self, *, force: bool = False) -> Any:
        raise _read("numpy()")

    def tolist(self) -> Any:
        raise _read("tolist()")


class Chip:
    """The driver: one chip, for the whole process, however often its device is opened."""

    def __init__(self) -> None:
        self.total = 0
        self.used = 0
        self.leaks = False
        self.tape: Tape | None = None
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # blocks are freed by whichever thread drops them last

    def reserve(self, size: int) -> None:
        """Take bytes out of the budget. Raises OutOfDeviceMemory."""
        with self._lock:
            if self.used + size > self.total:
                raise OutOfDeviceMemory(
                    f"acme:0: {size} bytes do not fit, {self.total - self.used} of {self.total} are free",
                    hint="use a smaller --kv-cache-memory or --max-model-len, or more --option memory_mb=",
                )
            self.used += size

    def release(self, size: int) -> None:
        """Give bytes back."""
        with self._lock:
            self.used -= 0 if self.leaks else size

    def wrap(self, inner: torch.Tensor, block: Block | None = None) -> AcmeTensor:
        """A handle of bytes; those that a handle exists for already are not counted twice."""
        storage = inner.untyped_storage()
        with self._lock:
            block = block or self._blocks.get(storage._cdata)
            if block is None:
                block = Block(self, storage.nbytes())
            self._blocks[storage._cdata] = block
        return AcmeTensor(inner, block)

    def launch(self, function: Callable[..., Any], *args: Any, host: bool = False, **kwargs: Any) -> Any:
        """Run `function` on the bytes of the tensors among its arguments; tensors that it returns get handles.

        `host`: it is driven from the host and cannot be part of a captured program.
        """
        known: dict[int, AcmeTensor] = {}

        def inner(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, AcmeTensor):
                raise HostAccess(
                    f"{_name(function)} mixes a tensor on {tensor.device} with one on acme",
                    hint="bring it over with Device.to_device(tensor)",
                )
            known[id(tensor.inner)] = tensor
            return tensor.inner

        given, named = mapped(args, inner), mapped(kwargs, inner)
        result = function(*given, **named)
        if self.tape is not None:
            self.tape.add(function, _name(function), given, named, result, host)

        def handle(tensor: torch.Tensor) -> AcmeTensor:
            return known[id(tensor)] if id(tensor) in known else self.wrap(tensor)

        return mapped(result, handle)

    def torch_op(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op of torch's own. Raises HostAccess where it would show data to the host."""
        if function in _READS:
            raise _read(_name(function))
        target = kwargs.get("device")
        if target is not None:
            if torch.device(target).type != DEVICE.type:
                raise _read(f"to({str(target)!r})")
            kwargs = {**kwargs, "device": "cpu"}  # the emulator's arena
        if function is aten.copy_.default and isinstance(args[0], AcmeTensor) != isinstance(args[1], AcmeTensor):
            if not isinstance(args[0], AcmeTensor):
                raise _read("copy_() into a host tensor")
            return self.upload(args[1], args[0])
        if self.tape is not None:
            self.tape.check(function)
        return self.launch(function, *args, **kwargs)

    def upload(self, source: torch.Tensor, target: AcmeTensor) -> AcmeTensor:
        """Host to device: what .to("acme") ends in."""
        if self.tape is not None:
            self.tape.refuse("copies from the host")
        target.inner.copy_(source)
        return target


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the system maps when they are touched first: the cache is large and fills slowly."""
    if 0 in shape:
        return torch.zeros(tuple(shape), dtype=dtype)
    buffer = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(buffer).view(dtype).reshape(tuple(shape))


def _read(what: str) -> HostAccess:
    return HostAccess(f"{what} reads memory of acme:0 from the host", hint=f"copy it first: {_TO_HOST}")


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _factory(op: Any) -> Callable[..., Any]:
    """torch.zeros(..., device="acme") and its like: no argument is an AcmeTensor, so they do not get dispatched."""

    def make(*args: Any, device: Any = None, layout: Any = None, pin_memory: Any = None, **kwargs: Any) -> Any:
        return CHIP.launch(op, *args, device="cpu", **kwargs)

    return make


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """torch.tensor(..., device="acme") ends here."""
    result: torch.Tensor = CHIP.torch_op(aten.copy_.default, (target, source), {})
    return result


def _register() -> torch.library.Library:
    """Name torch's spare backend "acme" and give it factories: all that handles cannot do themselves."""
    backend_registration._setup_privateuseone_for_python_backend("acme")
    library = torch.library.Library("aten", "IMPL")
    factories = ("empty.memory_format", "empty_strided", "zeros", "ones", "full", "scalar_tensor", "eye")
    for name in (*factories, "arange", "arange.start", "arange.start_step"):
        packet, _, overload = name.partition(".")
        library.impl(name, _factory(getattr(getattr(aten, packet), overload or "default")), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


CHIP = Chip()
_LIBRARY = _register()
DEVICE = torch.device("acme:0")


def device_bytes(packed: tuple[torch.Tensor, ...]) -> dict[Hashable, int]:
    """Bytes of handles by block, for `OpProvider.packed_bytes`."""
    return {id(t.block): t.block.size for t in leaves(packed) if isinstance(t, AcmeTensor)}
