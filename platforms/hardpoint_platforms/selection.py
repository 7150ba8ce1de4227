"""From what the user wrote after --device to one opened device, with the reason.

`auto` takes the first accelerator that has a device, by priority, and a host platform only where no accelerator plugin
is installed or every one works and finds nothing. An accelerator plugin that is installed but broken is an error: the
user paid for that chip and must not end on the host unawares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint_platforms.communication import Mesh
from hardpoint_platforms.device import Device, DeviceInfo
from hardpoint_platforms.discovery import PlatformEntry, PlatformRegistry, guard
from hardpoint_platforms.errors import DeviceUnavailable, PlatformError, PluginError
from hardpoint_platforms.exclusive import CLAIMS
from hardpoint_platforms.manifest import Kind
from hardpoint_platforms.options import validate_options

AUTO = "auto"
_REQUEST = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)(:(?P<index>\d{1,4}))?")


@dataclass(frozen=True)
class Selection:
    """The device chosen, not yet opened.

    Attributes:
        platform: its platform's name; index: its number there.
        info: what the probe said about it.
        reason: why this one, for people.
        warnings: what the user should know: plugins that are broken, accelerators that found nothing.
        registry: where the platform was loaded.
    """

    platform: str
    index: int
    info: DeviceInfo
    reason: str
    warnings: tuple[str, ...] = ()
    registry: PlatformRegistry = field(repr=False, compare=False, kw_only=True)


def parse_request(request: str) -> tuple[str | None, int | None]:
    """Split `auto`, `NAME` or `NAME:INDEX` into name (None for auto) and index. Raises DeviceUnavailable."""
    if request == AUTO:
        return None, None
    match = _REQUEST.fullmatch(request)
    if match is None or match["name"] == AUTO:
        raise DeviceUnavailable(
            f"--device {request!r} is not of the form auto, NAME or NAME:INDEX",
            hint="`hardpoint doctor` lists the platforms and their devices",
        )
    return match["name"], None if match["index"] is None else int(match["index"])


def select(request: str, registry: PlatformRegistry) -> Selection:
    """Choose a device.

    Raises PluginError or DeviceUnavailable with the cause and the mend; never falls to another device than asked for.
    """
    name, index = parse_request(request)
    return _auto(registry) if name is None else _named(name, index, registry)


def open_device(selection: Selection, options: Mapping[str, Any] | None = None, mesh: Mesh | None = None) -> Device:
    """Open the device chosen and check what the plugin hands over.

    mesh: with more than one rank as many devices, from the chosen one on, as one (`Platform.open_mesh`).

    `options` are checked against the manifest first. Raises PlatformError for a wrong option, DeviceUnavailable where
    the device cannot be had or another platform holds what only one in a process can have (`process_exclusive`),
    PluginError for anything else that the plugin does. Give it back with `close_device`.
    """
    from hardpoint_platforms.ops.catalogue import CONTRACTS
    from hardpoint_platforms.validation import check_device

    entry = selection.registry.entry(selection.platform)
    platform = selection.registry.load(selection.platform)
    checked = validate_options(entry.manifest, options or {}) if entry.manifest else {}
    hint = f"`hardpoint doctor` shows whether {selection.platform} works at all; --device NAME takes another one"
    refused: PlatformError | None = None
    with CLAIMS.opening(entry), guard(entry, "open", f"opening {selection.platform}:{selection.index} failed", hint):
        try:
            opened = (
                platform.open(selection.index, checked)
                if mesh is None or mesh.ranks == 1
                else platform.open_mesh(selection.index, mesh, checked)
            )
            device = check_device(entry, opened, CONTRACTS)
            CLAIMS.hold(entry, device)
            return device
        except PlatformError as error:
            refused = error
    raise refused


def open_target(
    name: str, target: str, registry: PlatformRegistry, mesh: Mesh, options: Mapping[str, Any] | None = None
) -> Device:
    """Devices of a kind that is not here (`Platform.target`), by the platform's name. Raises as `open_device` does."""
    entry = registry.entry(name)
    platform = registry.load(name)
    checked = validate_options(entry.manifest, options or {}) if entry.manifest else {}
    refused: PlatformError | None = None
    with guard(
        entry, "open", f"{name} cannot compile for {target}", "`hardpoint doctor` shows whether it works at all"
    ):
        try:
            return platform.target(target, mesh, checked)
        except PlatformError as error:
            refused = error
    raise refused


def close_device(device: Device) -> None:
    """Close a device that `open_device` gave, and let go of what its platform held for itself."""
    try:
        device.close()
    finally:
        CLAIMS.release(device)


def _named(name: str, index: int | None, registry: PlatformRegistry) -> Selection:
    found = registry.probe(name)
    if not found.devices:
        reasons = "; ".join(found.reasons) or "it gives no reason"
        raise DeviceUnavailable(
            f"platform {name!r} finds no device: {reasons}", hint="--device auto takes what there is"
        )
    chosen = found.devices[0] if index is None else next((d for d in found.devices if d.index == index), None)
    if chosen is None:
        listed = ", ".join(str(device) for device in found.devices)
        raise DeviceUnavailable(
            f"there is no {name}:{index}; {name!r} has {listed}", hint=f"--device {listed.split(',')[0]}"
        )
    return Selection(name, chosen.index, chosen, "asked for by name", tuple(found.reasons), registry=registry)


def _auto(registry: PlatformRegistry) -> Selection:
    groups = {kind: _by_priority(registry, kind) for kind in (Kind.ACCELERATOR, Kind.HOST)}
    warnings = [entry.problem.message for e in groups.values() for entry in e if entry.problem]
    broken: list[PluginError] = []
    empty: list[str] = []
    for entry in groups[Kind.ACCELERATOR]:
        chosen = _try(entry, registry, broken, empty)
        if chosen is not None:
            return _selection(chosen, "the accelerator of highest priority", broken, empty, warnings, registry)
    hosts = groups[Kind.HOST]
    if broken:
        raise _no_silent_fall(broken, hosts)
    why = "no accelerator has a device" if groups[Kind.ACCELERATOR] else "no accelerator plugin is installed"
    for entry in hosts:
        chosen = _try(entry, registry, broken, empty)
        if chosen is not None:
            return _selection(chosen, why, broken, empty, warnings, registry)
    told = "; ".join([*(error.message for error in broken), *empty]) or "no platform plugin is installed"
    hint = (broken[0].hint if broken else None) or "pip install hardpoint-cpu"
    raise DeviceUnavailable(f"--device auto finds nothing to run on: {told}", hint=hint)


def _by_priority(registry: PlatformRegistry, kind: Kind) -> list[PlatformEntry]:
    """Entries of a kind, best first. One whose manifest cannot be read may be an accelerator, so it counts as one."""
    chosen = [
        entry
        for entry in registry.entries.values()
        if (entry.manifest.kind if entry.manifest else Kind.ACCELERATOR) is kind
    ]
    return sorted(chosen, key=lambda e: (-e.manifest.priority if e.manifest else 0, e.name))


def _try(
    entry: PlatformEntry, registry: PlatformRegistry, broken: list[PluginError], empty: list[str]
) -> DeviceInfo | None:
    try:
        found = registry.probe(entry.name)
    except PluginError as error:
        broken.append(error)
        return None
    except DeviceUnavailable:
        return None  # its hook said: not my machine
    real = [device for device in found.devices if not device.stand_in]
    if real:
        return real[0]
    reasons = "; ".join(found.reasons) or "it gives no reason"
    if found.devices:
        reasons = f"{found.devices[0]} is {found.devices[0].name}, to be named where it is wanted"
    empty.append(f"platform {entry.name!r} ({entry.distribution} {entry.version}) finds no device: {reasons}")
    return None


def _selection(
    chosen: DeviceInfo,
    reason: str,
    broken: list[PluginError],
    empty: list[str],
    warnings: list[str],
    registry: PlatformRegistry,
) -> Selection:
    told = dict.fromkeys([*warnings, *(error.message for error in broken), *empty])
    return Selection(chosen.platform, chosen.index, chosen, reason, tuple(told), registry=registry)


def _no_silent_fall(broken: list[PluginError], hosts: list[PlatformEntry]) -> PluginError:
    first = broken[0]
    host = hosts[0].name if hosts else "reference"
    others = "".join(f"; also {error.message}" for error in broken[1:])
    told = first.message.removeprefix(f"platform plugin {first.plugin!r}: ")
    return PluginError(
        first.plugin,
        first.cause,
        f"{told}{others}. --device auto does not fall to the host while an accelerator plugin is broken",
        hint=f"{first.hint or 'see `hardpoint doctor`'}   (or insist on the host: --device {host})",
    )
