"""A device: the only code that a platform must write. Everything else has a default."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.ceilings import Ceilings
from hardpoint_platforms.communication import Communicator, Mesh
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.kv_transfer import HostTransfer, KVTransfer
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.program import EagerBuilder, ProgramBuilder, Weights
from hardpoint_platforms.state_cache import DenseStateCache, StateCache
from hardpoint_platforms.streams import Clock, Readback, Stream


@dataclass(frozen=True)
class DeviceInfo:
    """What `probe` finds without opening anything.

    Attributes:
        platform: the plugin's name; index: number among its devices.
        name: what people call it ("AMD EPYC 7B13, 2 cores").
        memory_bytes: total memory, 0 if unknown before opening.
        stand_in: it only plays a device that is not here: `auto` passes over it, and who wants it names it.
    """

    platform: str
    index: int
    name: str
    memory_bytes: int = 0
    stand_in: bool = False

    def __str__(self) -> str:
        return f"{self.platform}:{self.index}"


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes, as the device sees them now."""

    free: int
    total: int


class Device(ABC):
    """One opened device. It owns its memory and everything it hands out; nothing about it is global."""

    @property
    @abstractmethod
    def info(self) -> DeviceInfo:
        """Identity."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where its tensors live."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Facts that the core plans with; the same object each time."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Free and total memory now."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work has finished."""

    def close(self) -> None:
        """Give everything back. The device is unusable afterwards; a second call does nothing."""
        return

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory. Raises OutOfDeviceMemory."""
        try:
            if self.torch_device.type == "cpu":
                return _host_zeros(shape, dtype)
            return torch.zeros(tuple(shape), dtype=dtype, device=self.torch_device)
        except (RuntimeError, MemoryError) as error:
            raise OutOfDeviceMemory(
                f"{self.info}: no room for {tuple(shape)} of {dtype}: {error}",
                hint="give the KV cache less memory (--kv-cache-memory) or use a smaller --max-model-len",
            ) from error

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on this device; may return the same object where memory is shared."""
        return tensor.to(self.torch_device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device tensor on the host; waits for it."""
        return tensor.to("cpu")

    def upload(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Host tensors on this device, in order: the small arrays of one step, which may travel as one.

        The host tensors stay as they are until the step is done: where memory is shared they may be what is returned.
        """
        return tuple(self.to_device(tensor) for tensor in tensors)

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        """Start to copy device tensors to the host, behind the work that is queued now.

        What is queued later may overwrite them: the copies keep today's values.
        """
        return Readback(tuple(self.to_host(tensor) for tensor in tensors))

    def providers(self) -> Sequence[OpProvider]:
        """Its op implementations, best first; what it does not implement runs on the reference."""
        return ()

    def state_cache(self) -> StateCache:
        """Allocates the paged state."""
        return DenseStateCache(self)

    def stream(self) -> Stream:
        """A new stream."""
        return Stream()

    def clock(self) -> Clock:
        """The engine's source of time."""
        return Clock()

    def programs(self) -> ProgramBuilder:
        """Builds steps."""
        return EagerBuilder()

    def routine(self, body: Callable[..., Any], replaces: Sequence[int] = ()) -> Callable[..., Any]:
        """A function of device tensors that runs between steps: the token table, penalties, scores of prompts.

        body: ordinary PyTorch over tensors and trees of them; whatever else it is given is static. It may write in
            place into the arguments that `replaces` numbers, nothing else, and returns their new form; the caller
            passes that on and never touches the old one.

        On a device that compiles (`ExecutionMode.COMPILE`) the core calls it with the same shapes over and over, each
        of them once before `ProgramBuilder.seal`. On one of several ranks (`mesh`) it runs on each, and what it returns
        is the same on all. The default is `body` itself, op by op.
        """
        return body

    def ceilings(self) -> Ceilings | None:
        """Measure what this device can do at most, in well under a second; None where it cannot say.

        Called on request alone (`hardpoint bench kernels`), on an opened device that does nothing else.
        """
        return None

    def kernel_seconds(self) -> float | None:
        """Seconds that the device's own kernels ran since the last call, without what it took to call them.

        None where the device does not count. For `hardpoint bench kernels`.
        """
        return None

    def kv_transfer(self) -> KVTransfer:
        """Moves pages to and from other devices."""
        return HostTransfer()

    @property
    def mesh(self) -> Mesh:
        """The ranks that it runs by itself (`Platform.open_mesh`); of one device without axes.

        Such a device runs each program on all ranks at once. Weights (`load_ranks`) and the state differ from rank to
        rank; shapes, the layout of the cache and free memory are those of one; everything else is the same on each.
        """
        return Mesh((), ())

    def load_ranks(self, loads: Sequence[Callable[[Device], Weights]]) -> Weights:
        """The weights of all ranks of `mesh`: each of `loads`, in order of the ranks, makes those of one on the device
        that it is given."""
        (load,) = loads
        return load(self)

    def communicator(self, mesh: Mesh, rank: int, rendezvous: str) -> Communicator:
        """Join a mesh of ranks at `rendezvous` ("tcp://host:port"). The default runs over gloo on the host.

        A device that runs all ranks of its `mesh` gives the collectives of its programs; there is nothing to join.
        """
        from hardpoint_platforms.reference.communication import GlooCommunicator

        return GlooCommunicator(mesh, rank, rendezvous)


def _host_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that cost nothing until they are touched: torch writes them, calloc maps them."""
    if 0 in shape:
        return torch.zeros(tuple(shape), dtype=dtype)
    buffer = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(buffer).view(dtype).reshape(tuple(shape))
