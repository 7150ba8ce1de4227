"""The op table of a device: its own providers first, the reference for what is left."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint_platforms.binding import OpTable
from hardpoint_platforms.choices import KernelChoice
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.reference.providers import reference_providers


def op_table(device: Device, choices: Sequence[KernelChoice] = ()) -> OpTable:
    """A fresh table; one per model, because bindings and planners are those of one model."""
    return OpTable(CONTRACTS, device.providers(), reference_providers(device.to_device), choices)
