"""The processor as a device: host memory, threads, native kernels, and torch's beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint_cpu.ceilings import torch_ceilings
from hardpoint_cpu.machine import memory
from hardpoint_cpu.native.backend import Backend
from hardpoint_cpu.ops.providers import cpu_providers
from hardpoint_cpu.tuning import Tuning
from hardpoint_platforms.capabilities import Capabilities, ExecutionMode
from hardpoint_platforms.ceilings import Ceilings
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.program import ProgramBuilder

_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuDevice(Device):
    """One device for the whole host, whatever its number of sockets."""

    torch_device = torch.device("cpu")

    def __init__(self, info: DeviceInfo, tuning: Tuning, verified: bool, native: Backend | None = None) -> None:
        self._info = info
        self._native = native
        self._blocked = tuning.blocked
        self._capabilities = Capabilities(
            compute_dtypes=tuning.compute_dtypes,
            # Products are at full speed from about a hundred rows; more would only hold up the running streams.
            step_tokens=256,
            kv_dtypes=native.kv_dtypes if native is not None else _first(tuning.compute_dtypes[0], _KV_DTYPES),
            page_tokens=(16, 32, 64, 128, 8),
            unified_memory=True,
            host_tensors=True,
            tuning=tuning.choices if native is None else (*native.choices, *tuning.choices),
            mode=ExecutionMode.EAGER if native is None else ExecutionMode.CAPTURE,
            verified=verified,
        )

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def memory(self) -> MemoryInfo:
        return MemoryInfo(*memory())

    def synchronize(self) -> None:
        """Host kernels have finished when they return."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: torch takes microseconds to find out that it is there already, and a step moves many."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Likewise."""
        return tensor

    def providers(self) -> Sequence[OpProvider]:
        torch_ones = cpu_providers(self._blocked)
        return torch_ones if self._native is None else (*self._native.providers(), *torch_ones)

    def programs(self) -> ProgramBuilder:
        return super().programs() if self._native is None else self._native.programs()

    def ceilings(self) -> Ceilings | None:
        found = None if self._native is None else self._native.ceilings()
        return torch_ceilings(self._capabilities.compute_dtypes) if found is None else found

    def kernel_seconds(self) -> float | None:
        return None if self._native is None else self._native.kernel_seconds()

    def close(self) -> None:
        if self._native is not None:
            self._native.close()


def _first(best: torch.dtype, others: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    return (best, *(dtype for dtype in others if dtype is not best))
