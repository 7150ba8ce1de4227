"""How much memory the device has: a TPU says so itself; the processor back end offers a part of the host's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec

from hardpoint_platforms.device import MemoryInfo
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_tpu.mesh import APART, SAME
from hardpoint_tpu.runtime import Runtime


class Memory:
    """Counts and hands out the memory of one device."""

    def __init__(self, runtime: Runtime, limit: int | None = None) -> None:
        """`limit`: bytes that are offered where the device does not say how many it has."""
        self._runtime = runtime
        self._limit, self._count = limit or host_memory() // 2, runtime.chips.count

    def info(self) -> MemoryInfo:
        """Free and total bytes now; of several chips those of the one that has least."""
        told = self._runtime.memory()
        if told:
            return MemoryInfo(max(0, min(limit - used for limit, used in told)), min(limit for limit, _ in told))
        used, count = sum(_bytes_held(array) for array in jax.live_arrays() if not array.is_deleted()), self._count
        return MemoryInfo(max(0, self._limit - used) // count, self._limit // count)

    def require(self, size: int, what: str) -> None:
        """Raise OutOfDeviceMemory where `size` bytes more do not fit."""
        free = self.info().free
        if size > free:
            raise OutOfDeviceMemory(
                f"{self._runtime.name}: no room for {what}: {size} bytes wanted, {free} free",
                hint="give the KV cache less memory (--kv-cache-memory) or use a smaller --max-model-len",
            )

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, spec: PartitionSpec = SAME) -> torch.Tensor:
        """Zeroed memory of the device; with `APART` of this shape on each chip. Raises OutOfDeviceMemory."""
        from torchax.ops.mappings import t2j_dtype

        what = f"{tuple(shape)} of {dtype}"
        self.require(math.prod(shape) * dtype.itemsize, what)
        whole = (shape[0] * self._count, *shape[1:]) if spec == APART else tuple(shape)
        with self._runtime.memory_errors(what):
            return self._runtime.wrap(self._runtime.zeros(whole, t2j_dtype(dtype), spec))


def _bytes_held(array: Any) -> int:
    """Of an array on all its devices."""
    return sum(shard.data.nbytes for shard in array.addressable_shards)


def host_memory() -> int:
    """Bytes of the host's memory, 0 where the system does not tell."""
    table = Path("/proc/meminfo")
    if not table.exists():
        return 0
    row = next((line for line in table.read_text(encoding="ascii").splitlines() if line.startswith("MemTotal:")), "")
    return int(row.split()[1]) << 10 if row else 0
