"""A platform: finds its devices without touching them, and opens one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint_platforms.communication import Mesh
from hardpoint_platforms.device import Device, DeviceInfo
from hardpoint_platforms.errors import DeviceUnavailable


@dataclass(frozen=True)
class ProbeResult:
    """What a platform found.

    `reasons` say why there are no devices, or why one was left out; they are shown to the user as they are.
    """

    devices: tuple[DeviceInfo, ...] = ()
    reasons: tuple[str, ...] = ()


class Platform(ABC):
    """One kind of device. Made by a plugin's `hardpoint_platform()` hook; holds no device state itself."""

    @abstractmethod
    def probe(self) -> ProbeResult:
        """Look for devices: at most two seconds, no device context, no exception for an absent device."""

    @abstractmethod
    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        """Open a device that `probe` named.

        `options` follow the manifest's options schema. Raises DeviceUnavailable.
        """

    def open_mesh(self, index: int, mesh: Mesh, options: Mapping[str, Any]) -> Device:
        """Open as many devices as the mesh has ranks, from `index` on, as one that runs all ranks in this process.

        The device's `mesh` is this one. For platforms whose programs span devices; the default says that it is none.
        Raises DeviceUnavailable.
        """
        raise DeviceUnavailable(
            f"{type(self).__name__} runs one rank per process, and cannot open {mesh.ranks} devices as one",
            hint="--tensor-parallel-size needs a platform whose programs span devices",
        )

    def target(self, name: str, mesh: Mesh, options: Mapping[str, Any]) -> Device:
        """Devices that are not here, by the name of their kind ("v5e-2x2"), as one device that runs the mesh.

        For `hardpoint plan`: its weights and state have shapes and no memory, its programs are compiled and weighed
        (`Program.footprint`), and nothing can be run. `memory` tells what a device of that kind has. Raises
        DeviceUnavailable, also for a name that nobody knows; the default knows none.
        """
        raise DeviceUnavailable(f"{type(self).__name__} compiles for no device that is not here")
