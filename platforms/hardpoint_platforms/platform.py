"""A platform: finds its devices without touching them, and opens one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint_platforms.device import Device, DeviceInfo


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
