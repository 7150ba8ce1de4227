"""How much memory the device has: a TPU says so itself; the processor back end offers a part of the host's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import torch

from hardpoint_platforms.device import MemoryInfo
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_tpu.runtime import Runtime


class Memory:
    """Counts and hands out the memory of one device."""

    def __init__(self, runtime: Runtime, limit: int | None = None) -> None:
        """`limit`: bytes that are offered where the device does not say how many it has."""
        self._runtime = runtime
        self._limit = limit or host_memory() // 2

    def info(self) -> MemoryInfo:
        """Free and total bytes now."""
        told = self._runtime.device.memory_stats() or {}
        if "bytes_limit" in told:
            total, used = int(told["bytes_limit"]), int(told["bytes_in_use"])
        else:
            total, used = self._limit, sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())
        return MemoryInfo(max(0, total - used), total)

    def require(self, size: int, what: str) -> None:
        """Raise OutOfDeviceMemory where `size` bytes more do not fit."""
        free = self.info().free
        if size > free:
            raise OutOfDeviceMemory(
                f"{self._runtime.name}: no room for {what}: {size} bytes wanted, {free} free",
                hint="give the KV cache less memory (--kv-cache-memory) or use a smaller --max-model-len",
            )

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of the device. Raises OutOfDeviceMemory."""
        from torchax.ops.mappings import t2j_dtype

        what = f"{tuple(shape)} of {dtype}"
        self.require(math.prod(shape) * dtype.itemsize, what)
        with self._runtime.memory_errors(what):
            made = jnp.zeros(tuple(shape), t2j_dtype(dtype), device=self._runtime.device)
        return self._runtime.wrap(made)


def host_memory() -> int:
    """Bytes of the host's memory, 0 where the system does not tell."""
    table = Path("/proc/meminfo")
    if not table.exists():
        return 0
    row = next((line for line in table.read_text(encoding="ascii").splitlines() if line.startswith("MemTotal:")), "")
    return int(row.split()[1]) << 10 if row else 0
