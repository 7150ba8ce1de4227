"""What `hardpoint doctor` shows: every announced platform, whether it works, and what to do if not.

Plain data; the command line renders it. Each device computes something: it allocates, runs a small matrix product
through its bound `linear` op, and the result, copied back, is held against the host's; unless it says that it computes
nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hardpoint_platforms.discovery import PlatformEntry, PlatformRegistry, stdout_to_stderr
from hardpoint_platforms.errors import DeviceUnavailable, HardpointError, PlatformError, PluginError

if TYPE_CHECKING:
    from hardpoint_platforms.device import Device

PASS, FAIL, ABSENT = "PASS", "FAIL", "absent"
_TOLERANCE = 1e-2  # relative; every dtype's matrix product of 64 terms is far inside


@dataclass(frozen=True)
class DeviceRow:
    """One device, tried out.

    Attributes:
        device: "cpu:0"; name: what people call it.
        status: PASS or FAIL.
        memory_free, memory_total: bytes, 0 where it could not be opened.
        computed: what was computed and how long it took, or why not.
        mend: what to do, or None.
        tuning: (name, value, reason) of choices made for this machine.
        verified: whether its authors ran the plugin on such hardware.
    """

    device: str
    name: str
    status: str
    computed: str
    memory_free: int = 0
    memory_total: int = 0
    mend: str | None = None
    tuning: tuple[tuple[str, str, str], ...] = ()
    verified: bool = False


@dataclass(frozen=True)
class Row:
    """One platform.

    Attributes:
        platform, distribution, version: identity.
        kind: accelerator, host or test; "?" if the manifest cannot be read.
        interfaces: SPI versions that the plugin speaks, as text.
        status: PASS, FAIL, or absent (works, but there is no such device here).
        cause: the PluginError's cause word, or None.
        reason, mend: why, and what to do.
        devices: the devices tried.
        exclusive: what it needs for itself (`process_exclusive`): one process has one platform that names it.
    """

    platform: str
    distribution: str
    version: str
    kind: str
    status: str
    reason: str = ""
    cause: str | None = None
    mend: str | None = None
    interfaces: dict[str, str] = field(default_factory=dict)
    devices: tuple[DeviceRow, ...] = ()
    exclusive: tuple[str, ...] = ()


def diagnose(registry: PlatformRegistry) -> list[Row]:
    """Try every platform. Never raises for what a plugin does; sorted by kind, priority and name."""
    order = {"accelerator": 0, "?": 0, "host": 1, "test": 2}
    rows = [_diagnose(entry, registry) for entry in registry.entries.values()]
    return sorted(rows, key=lambda row: (order[row.kind], row.platform))


def _diagnose(entry: PlatformEntry, registry: PlatformRegistry) -> Row:
    manifest = entry.manifest
    kind = manifest.kind.value if manifest else "?"
    interfaces = {name: str(spoken) for name, spoken in manifest.interfaces.items()} if manifest else {}
    tokens = tuple(manifest.process_exclusive) if manifest else ()
    held = f"one process has one platform that holds {', '.join(tokens)}" if tokens else ""

    def row(status: str, reason: str, error: HardpointError | None = None, devices: tuple[DeviceRow, ...] = ()) -> Row:
        cause = error.cause if isinstance(error, PluginError) else None
        mend = error.hint if error else None
        told = "; ".join(filter(None, (reason, held)))
        return Row(
            entry.name, entry.distribution, entry.version, kind, status, told, cause, mend, interfaces, devices, tokens
        )

    try:
        found = registry.probe(entry.name)
    except PluginError as error:
        return row(FAIL, error.message, error)
    except DeviceUnavailable as error:
        return row(ABSENT, error.message, error)
    if not found.devices:
        return row(ABSENT, "; ".join(found.reasons) or "no device found")
    devices = tuple(_try_device(entry.name, info.index, registry) for info in found.devices)
    failed = [device for device in devices if device.status == FAIL]
    reason = failed[0].computed if failed else "; ".join(found.reasons)
    return row(FAIL if failed else PASS, reason, devices=devices)


def _try_device(platform: str, index: int, registry: PlatformRegistry) -> DeviceRow:
    from hardpoint_platforms.selection import open_device, select

    selection = select(f"{platform}:{index}", registry)
    info = selection.info
    try:
        device = open_device(selection)
    except PlatformError as error:
        return DeviceRow(str(info), info.name, FAIL, error.message, mend=error.hint)
    try:
        with stdout_to_stderr():
            return _use(device)
    except Exception as error:
        return DeviceRow(str(info), info.name, FAIL, f"{type(error).__name__}: {error}")


def _use(device: Device) -> DeviceRow:
    from hardpoint_platforms.selection import close_device

    info, capabilities = device.info, device.capabilities()
    try:
        memory = device.memory()
        worked, computed = _compute(device)
    finally:
        close_device(device)
    return DeviceRow(
        str(info),
        info.name,
        PASS if worked else FAIL,
        computed,
        memory.free,
        memory.total,
        tuning=tuple((choice.name, choice.value, choice.reason) for choice in capabilities.tuning),
        verified=capabilities.verified,
    )


def _compute(device: Device) -> tuple[bool, str]:
    """Whether a small matrix product comes back right, and a line about it."""
    import torch

    from hardpoint_platforms.ops.catalogue import CONTRACTS
    from hardpoint_platforms.ops.contract import WeightSpec
    from hardpoint_platforms.ops.table import op_table

    dtype = device.capabilities().compute_dtypes[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, generator=generator).to(dtype)
    weight = torch.randn(32, 64, generator=generator).to(dtype)
    instance = CONTRACTS["linear"].instance(
        "doctor", dtype, {"weight": WeightSpec((32, 64), dtype)}, in_features=64, out_features=32, bias=False
    )
    bound = op_table(device).bind(instance)
    start = time.perf_counter()
    with torch.inference_mode():
        packed = bound.provider.pack(instance, {"weight": device.to_device(weight)})
        result = device.to_host(bound.kernel(device.to_device(x), packed)).float()
        device.synchronize()
    milliseconds = (time.perf_counter() - start) * 1e3
    expected = x.float() @ weight.float().T
    if not device.capabilities().computes:
        return True, "computes nothing, as it says: results are zeros, on a clock of its own"
    # Written so that NaN fails.
    error = float((result - expected).abs().max() / expected.abs().max())
    what = f"8x64 by 64x32 in {str(dtype).removeprefix('torch.')} through {bound.provider.name!r}"
    if error <= _TOLERANCE:
        return True, f"{what}: {milliseconds:.1f} ms, off by {error:.0e}"
    return False, f"{what} is wrong: off by {error:.0e} of the largest value"
