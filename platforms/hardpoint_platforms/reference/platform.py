"""The oracle platform: one device on the host, no kernels of its own, so that every op runs on its reference.

This is all that a level 0 platform must write; docs/how-to/write-a-plugin.md starts from here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.platform import Platform, ProbeResult

_INFO = DeviceInfo("reference", 0, "plain PyTorch on the host")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CAPABILITIES = Capabilities(
    compute_dtypes=_DTYPES, kv_dtypes=_DTYPES, page_tokens=(16, 8, 32, 64), unified_memory=True, verified=True
)


class ReferenceDevice(Device):
    """Host memory and nothing else."""

    info = _INFO
    torch_device = torch.device("cpu")

    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def memory(self) -> MemoryInfo:
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryInfo(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)

    def synchronize(self) -> None:
        """Host ops have finished when they return."""


class ReferencePlatform(Platform):
    """Always there."""

    def probe(self) -> ProbeResult:
        return ProbeResult((_INFO,))

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        if index != 0:
            raise DeviceUnavailable(f"there is no reference:{index}, only reference:0")
        return ReferenceDevice()


@hookimpl
def hardpoint_platform() -> Platform:
    """Registered under the entry point `reference`."""
    return ReferencePlatform()
