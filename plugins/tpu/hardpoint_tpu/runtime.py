"""One opened device as the rest of the plugin sees it: JAX, a torchax environment, and what traces PyTorch into XLA."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import PartitionSpec

from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_tpu.arrays import to_numpy, to_torch
from hardpoint_tpu.compiles import Compiles
from hardpoint_tpu.lowerings import add_lowerings
from hardpoint_tpu.mesh import SAME, Chips, spec_of
from hardpoint_tpu.torchax_compat import environment
from hardpoint_tpu.trees import Form, flatten, rebuild

#: How arguments and results of a program lie on the chips of a mesh; see `Chips.spread`.
Lie = tuple[tuple[PartitionSpec, ...], Any]

#: How XLA says that memory ran out.
_EXHAUSTED = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


class Runtime:
    """Owns the environment and the JAX devices. Not shared between opened devices."""

    def __init__(self, chips: Chips, name: str, effort: int | None = None) -> None:
        """`effort`: XLA's optimization level on the processor, None for its own choice."""
        # Positions, seeds and sums of probabilities are 64 bits wide in the contracts.
        jax.config.update("jax_enable_x64", True)
        self.chips, self.name = chips, name
        self.device = chips.devices[0]
        self.on_tpu = self.device.platform == "tpu"
        self.compiles = Compiles()
        self.on_host = self.device.platform == "cpu"
        if not (self.on_tpu or self.on_host):
            # else a GPU rounds what float32 products read to 10 bits; those of a TPU ask for it one by one
            jax.config.update("jax_default_matmul_precision", "highest")
        options = {"xla_backend_optimization_level": effort}
        self._options = options if self.on_host and effort is not None else None
        #: Readings to the host that have begun, by the identity of the array: to be ended before it is donated.
        self.awaited: dict[int, Callable[[], Any]] = {}
        #: Compiles programs beside each other; the compiler needs no interpreter.
        self.compiling = ThreadPoolExecutor(os.cpu_count(), "xla-compile")
        self._env = environment()
        add_lowerings(self._env)
        from torchax.tensor import Tensor

        self._tensor: Callable[..., torch.Tensor] = Tensor

    def close(self) -> None:
        """Stop counting compiles. JAX's own client lives as long as the process."""
        self.compiling.shutdown(cancel_futures=True)
        self.compiles.close()

    def on_chip(self, rank: int) -> Runtime:
        """The same, of one of the chips."""
        one = copy.copy(self)
        one.chips = Chips(self.chips.devices[rank : rank + 1])
        one.device = one.chips.devices[0]
        return one

    def wrap(self, array: Any) -> torch.Tensor:
        """A JAX array as a tensor of this device. No copy."""
        with torch.inference_mode(False):
            return self._tensor(array, self._env)

    def put(self, tensors: Sequence[torch.Tensor], copy: bool) -> tuple[torch.Tensor, ...]:
        """Host tensors on the device in one transfer, on each chip; without `copy` they may be what is read until the
        step is done.

        Raises OutOfDeviceMemory.
        """
        host = [to_numpy(tensor, copy) for tensor in tensors]
        with self.memory_errors(f"{sum(part.nbytes for part in host)} bytes from the host"):
            return tuple(self.wrap(array) for array in jax.device_put(host, self.chips.placed(SAME)))

    def memory(self) -> list[tuple[int, int]]:
        """Bytes that each chip has and that are in use; empty where they do not tell."""
        stats = [device.memory_stats() or {} for device in self.chips.devices]
        return [(int(one["bytes_limit"]), int(one["bytes_in_use"])) for one in stats if "bytes_limit" in one]

    def zeros(self, shape: Sequence[int], dtype: Any, spec: PartitionSpec) -> Any:
        """A zeroed array of JAX's `dtype`, lying on the chips as `spec` says."""
        return jnp.zeros(tuple(shape), dtype, device=self.chips.placed(spec))

    def lowered(self, jitted: Any, arrays: Sequence[Any]) -> Any:
        """A jitted function traced for these arrays, ready to be compiled."""
        return jitted.lower(*arrays)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device tensor on the host; waits for it."""
        return to_torch(array_of(tensor)) if on_device(tensor) else tensor.clone()

    @contextmanager
    def memory_errors(self, what: str) -> Any:
        """Turn XLA's ways of saying that memory ran out into OutOfDeviceMemory."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or any(word in str(error) for word in _EXHAUSTED):
                told = str(error).strip().partition("\n")[0]
                raise OutOfDeviceMemory(
                    f"{self.name}: no room for {what}: {told}",
                    hint="give the KV cache less memory (--kv-cache-memory) or use a smaller --max-model-len",
                ) from error
            raise

    @contextmanager
    def tracing(self) -> Any:
        """PyTorch inside becomes JAX, tensor by tensor."""
        with torch.inference_mode(False), torch.no_grad(), self._env:
            yield

    def traced(self, body: Callable[..., Any], form: Any, told: list[Form]) -> Callable[..., tuple[Any, ...]]:
        """`body(*tree)` of arguments of `form` as a function of arrays; appends its result's form to `told`."""

        def run(*arrays: Any) -> tuple[Any, ...]:
            arguments = rebuild(form, iter(arrays), self.wrap)
            with self.tracing():
                result = body(*arguments)
            out: list[Any] = []
            told.append(flatten(result, out))
            return tuple(out)

        return run

    def jit(self, run: Callable[..., Any], donated: Sequence[int] = (), lie: Lie | None = None) -> Any:
        """`run` as a function that XLA compiles, with this device's options.

        lie: how arguments and results lie on the chips of a mesh; None where it runs on one chip.
        """
        whole = run if lie is None else self.chips.spread(run, *lie)
        return jax.jit(whole, donate_argnums=tuple(donated), compiler_options=self._options)

    def routine(self, body: Callable[..., Any], replaces: Sequence[int] = ()) -> Routine:
        """`body` compiled for each form of arguments that it meets; see `Device.routine`."""
        return Routine(self, body, frozenset(replaces))


class Routine:
    """A PyTorch function of trees that XLA compiles as a whole, once per form and shapes of its arguments.

    Called while a larger program is traced it becomes a function of that program, traced once for all its calls. On a
    mesh its results are the same on each chip, whatever its arguments are.
    """

    def __init__(self, runtime: Runtime, body: Callable[..., Any], replaces: frozenset[int]) -> None:
        self._runtime, self._body, self._replaces = runtime, body, replaces
        self._known: dict[tuple[Form, bool, Lie | None], tuple[Callable[..., tuple[Any, ...]], list[Form]]] = {}

    def __call__(self, *arguments: Any) -> Any:
        arrays: list[Any] = []
        parts: list[Form] = []
        donated: list[int] = []
        for index, argument in enumerate(arguments):
            before = len(arrays)
            parts.append(flatten(argument, arrays))
            if index in self._replaces:
                donated += range(before, len(arrays))
        inside = any(isinstance(array, jax.core.Tracer) for array in arrays)
        lie = None if inside else self._lie(arrays)
        key = ((tuple, *parts), inside, lie)
        if key not in self._known:
            told: list[Form] = []
            run = self._runtime.traced(self._body, key[0], told)
            self._known[key] = (jax.jit(run) if inside else self._runtime.jit(run, donated, lie), told)
        compiled, told = self._known[key]
        for index in donated if self._runtime.awaited and not inside else ():
            if reading := self._runtime.awaited.get(id(arrays[index])):
                reading()
        with self._runtime.memory_errors("a routine"):
            out = compiled(*arrays)
        return rebuild(told[-1], iter(out), self._runtime.wrap)

    def _lie(self, arrays: Sequence[Any]) -> Lie | None:
        """How the arguments lie on a mesh: what comes out is the same on each chip. None where they are on one chip."""
        specs = tuple(map(spec_of, arrays)) if self._runtime.chips.count > 1 else ()
        known = tuple(spec for spec in specs if spec is not None)
        return (known, SAME) if known and len(known) == len(specs) else None


def on_device(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of this plugin."""
    return hasattr(tensor, "_elem")


def array_of(tensor: torch.Tensor) -> Any:
    """Its JAX array."""
    return tensor._elem  # type: ignore[attr-defined]


def lifted(function: Callable[..., Any], wrap: Callable[[Any], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of JAX arrays as one of tensors, for the inside of a kernel."""
    return lambda *tensors: wrap(function(*(array_of(tensor) for tensor in tensors)))
