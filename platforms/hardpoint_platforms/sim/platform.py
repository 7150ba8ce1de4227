"""The platform `sim`: one device that computes nothing and whose clock passes only as a roofline says.

It serves any model (`--load-format dummy` needs no weights) with the real scheduler, pager, runner and model code, so
that what these cost and do can be seen without a chip, and steps take the virtual time of the chip in its options.
Capacity planning over hours of traffic is `hardpoint simulate`: it leaves out the model code too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_platforms.sim.providers import Rates, VirtualClock, sim_providers
from hardpoint_platforms.streams import Clock

_INFO = DeviceInfo("sim", 0, "computes nothing, virtual clock")
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_CAPABILITIES = Capabilities(
    compute_dtypes=_DTYPES, kv_dtypes=_DTYPES, page_tokens=(16, 8, 32, 64), verified=True, computes=False
)


class SimDevice(Device):
    """Owns its clock. memory_bytes: what it says it has; host memory is touched only where pages are written."""

    info = _INFO
    torch_device = torch.device("cpu")

    def __init__(self, rates: Rates, memory_bytes: int) -> None:
        self._rates, self._memory = rates, memory_bytes
        self._clock = VirtualClock()

    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def memory(self) -> MemoryInfo:
        return MemoryInfo(self._memory, self._memory)

    def synchronize(self) -> None:
        """Ops have finished when they return: their time has passed on the clock."""

    def clock(self) -> Clock:
        return self._clock

    def providers(self) -> Sequence[OpProvider]:
        return sim_providers(self._clock, self._rates)


class SimPlatform(Platform):
    """Always there; never chosen by `auto`, being of kind test."""

    def probe(self) -> ProbeResult:
        return ProbeResult((_INFO,))

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        if index != 0:
            raise DeviceUnavailable(f"there is no sim:{index}, only sim:0")
        rates = Rates(
            operations=float(options["teraflops"]) * 1e12,
            bytes=float(options["gigabytes_per_second"]) * 1e9,
            launch=float(options["launch_microseconds"]) * 1e-6,
        )
        return SimDevice(rates, int(options["memory_mib"]) << 20)


@hookimpl
def hardpoint_platform() -> Platform:
    """For the entry point `sim`."""
    return SimPlatform()
