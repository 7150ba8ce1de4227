"""The processor as a device: host memory, torch's threads, and the kernels of `hardpoint_cpu.ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint_cpu.machine import memory
from hardpoint_cpu.ops.providers import cpu_providers
from hardpoint_cpu.tuning import Tuning
from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.ops.provider import OpProvider

_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuDevice(Device):
    """One device for the whole host, whatever its number of sockets."""

    torch_device = torch.device("cpu")

    def __init__(self, info: DeviceInfo, tuning: Tuning, verified: bool) -> None:
        self._info = info
        self._blocked = tuning.blocked
        self._capabilities = Capabilities(
            compute_dtypes=tuning.compute_dtypes,
            # Products are at full speed from about a hundred rows; more would only hold up the running streams.
            step_tokens=256,
            kv_dtypes=_first(tuning.compute_dtypes[0], _KV_DTYPES),
            page_tokens=(16, 32, 64, 128, 8),
            unified_memory=True,
            tuning=tuning.choices,
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

    def providers(self) -> Sequence[OpProvider]:
        return cpu_providers(self._blocked)


def _first(best: torch.dtype, others: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    return (best, *(dtype for dtype in others if dtype is not best))
