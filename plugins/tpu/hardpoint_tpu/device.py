"""A TPU (or another back end of JAX) as a device: memory, transfers, and what compiles steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch

from hardpoint_platforms.capabilities import BatchLimits, Capabilities, ExecutionMode, TuningChoice
from hardpoint_platforms.communication import TENSOR_AXIS, Communicator, Mesh
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.program import ProgramBuilder, Weights
from hardpoint_platforms.state_cache import StateCache
from hardpoint_platforms.streams import Readback
from hardpoint_platforms.strict.static.buckets import PREFILL_START, shapes_for
from hardpoint_tpu.arrays import to_torch
from hardpoint_tpu.memory import Memory
from hardpoint_tpu.mesh import Collectives
from hardpoint_tpu.program import XlaBuilder
from hardpoint_tpu.providers import tpu_providers
from hardpoint_tpu.runtime import Runtime, array_of
from hardpoint_tpu.state import TpuStateCache
from hardpoint_tpu.trees import flatten, rebuild

_ON_TPU, _ON_HOST = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)


class TpuDevice(Device):
    """One chip, or several that run each program together, or the processor or a GPU in their place."""

    def __init__(self, info: DeviceInfo, runtime: Runtime, options: Mapping[str, Any]) -> None:
        self._info = info
        self._runtime = runtime
        limit = options.get("memory_mib")
        self._memory = Memory(self._runtime, None if limit is None else int(limit) << 20)
        self._growth = int(options.get("growth", 4))
        self._shapes = shapes_for(options.get("shapes", "each"))
        self._providers = tuple(tpu_providers(self._runtime))
        self._capabilities = _capabilities(self._runtime, options)

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def torch_device(self) -> torch.device:
        return torch.device("jax", 0)

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def memory(self) -> MemoryInfo:
        return self._memory.info()

    def synchronize(self) -> None:
        jax.effects_barrier()
        jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])

    def close(self) -> None:
        self._runtime.close()

    @property
    def mesh(self) -> Mesh:
        count = self._runtime.chips.count
        return Mesh((TENSOR_AXIS,), (count,)) if count > 1 else Mesh((), ())

    def communicator(self, mesh: Mesh, rank: int, rendezvous: str) -> Communicator:
        if mesh == self.mesh:
            return Collectives(mesh, self._runtime.wrap)
        if mesh.ranks > 1:
            raise UnsupportedOperation("one process runs all chips as one program: there are no ranks to join")
        return super().communicator(mesh, rank, rendezvous)

    def load_ranks(self, loads: Sequence[Callable[[Device], Weights]]) -> Weights:
        if len(loads) == 1:
            return loads[0](self)
        leaves: list[list[Any]] = []
        for rank, load in enumerate(loads):
            leaves.append([])
            form = flatten(load(self._chip(rank)), leaves[-1])
        joined: dict[int, Any] = {}
        for parts in zip(*leaves, strict=True):
            # weights that ops share stay shared
            joined.setdefault(id(parts[0]), self._runtime.chips.join(parts))
        weights: Weights = rebuild(form, iter([joined[id(first)] for first in leaves[0]]), self._runtime.wrap)
        return weights

    def _chip(self, rank: int) -> TpuDevice:
        """One of the chips, to make its weights on."""
        chip = copy.copy(self)
        chip._runtime = self._runtime.on_chip(rank)
        return chip

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.zeros(shape, dtype)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._runtime.put((tensor,), copy=True)[0]

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._runtime.fetch(tensor)

    def upload(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self._runtime.put(tensors, copy=False)

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        return _Coming(self._runtime, [array_of(tensor) for tensor in tensors])

    def routine(self, body: Callable[..., Any], replaces: Sequence[int] = ()) -> Callable[..., Any]:
        return self._runtime.routine(body, replaces)

    def providers(self) -> Sequence[OpProvider]:
        return self._providers

    def state_cache(self) -> StateCache:
        return TpuStateCache(self._runtime, self._memory)

    def programs(self) -> ProgramBuilder:
        return XlaBuilder(self._capabilities.limits, self._runtime, self._growth, self._shapes)

    @property
    def late_compiles(self) -> int:
        """Programs that XLA compiled after serving began: none, unless a shape was not prepared."""
        return self._runtime.compiles.late


class _Coming(Readback):
    """Arrays whose copies to the host have begun. What donates one ends the reading first."""

    def __init__(self, runtime: Runtime, arrays: list[Any]) -> None:
        super().__init__(())
        self._awaited, self._arrays = runtime.awaited, arrays
        for array in arrays:
            array.copy_to_host_async()
            self._awaited[id(array)] = self.wait

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self._arrays:
            self._tensors = tuple(map(to_torch, self._arrays))
            for array in self._arrays:
                self._awaited.pop(id(array), None)
            self._arrays = []
        return self._tensors


def _capabilities(runtime: Runtime, options: Mapping[str, Any]) -> Capabilities:
    dtypes = _ON_TPU if runtime.on_tpu else _ON_HOST
    growth = int(options.get("growth", 4))
    where = "the processor" if runtime.on_host else runtime.device.device_kind
    return Capabilities(
        compute_dtypes=dtypes,
        step_tokens=2048 if runtime.on_tpu else 256,
        kv_dtypes=dtypes,
        kv_as_computed=True,
        page_tokens=(16, 32, 64, 128, 8),
        mode=ExecutionMode.COMPILE,
        functional_state=True,
        limits=BatchLimits(
            mixed=False,
            max_prefill_requests=1,
            token_buckets=tuple(sorted({growth**n for n in range(6)} | {PREFILL_START * growth**n for n in range(6)})),
            request_buckets=tuple(growth**n for n in range(6)),
        ),
        tuning=(
            TuningChoice("back end", where, f"jax {jax.__version__}, {runtime.device.client.platform_version[:40]}"),
        ),
        verified=False,
    )
