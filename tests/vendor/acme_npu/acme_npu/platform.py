"""The platform that the entry point names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acme_npu.device import INFO, AcmeDevice
from acme_npu.faults import chosen_fault
from hardpoint_platforms.device import Device
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.platform import Platform, ProbeResult


class AcmePlatform(Platform):
    """One chip, emulated, so always there."""

    def probe(self) -> ProbeResult:
        return ProbeResult((INFO,))

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        if index != 0:
            raise DeviceUnavailable(f"there is no acme:{index}, only acme:0")
        return AcmeDevice(int(options.get("memory_mb", 2048)) << 20, chosen_fault(options))


@hookimpl
def hardpoint_platform() -> Platform:
    """Called once by Hardpoint."""
    return AcmePlatform()
