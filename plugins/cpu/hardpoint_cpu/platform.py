"""The platform `cpu`: always one device, the host's processor."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint_cpu.machine import look_at_machine, memory
from hardpoint_platforms.device import Device, DeviceInfo
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.platform import Platform, ProbeResult

#: Kinds of processor on which the authors ran it.
_VERIFIED = ("x86_64", "AMD64")


class CpuPlatform(Platform):
    """Finds the processor and opens it."""

    def probe(self) -> ProbeResult:
        machine = look_at_machine()
        name = f"{machine.name}, {machine.cores} cores"
        return ProbeResult((DeviceInfo("cpu", 0, name, memory()[1]),))

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        from hardpoint_cpu.device import CpuDevice
        from hardpoint_cpu.native.backend import Backend, load
        from hardpoint_cpu.tuning import tune

        if index != 0:
            raise DeviceUnavailable(f"there is no cpu:{index}: the whole host is cpu:0", hint="--device cpu")
        info = self.probe().devices[0]
        machine = look_at_machine()
        library, choices = load(options)
        tuning = tune(machine, options, native=library is not None)
        native = None if library is None else Backend(library, machine, tuning.threads, options)
        tuning = replace(tuning, choices=(*choices, *tuning.choices))
        return CpuDevice(info, tuning, platform.machine() in _VERIFIED, native)


@hookimpl
def hardpoint_platform() -> Platform:
    """Registered under the entry point `cpu`."""
    return CpuPlatform()
