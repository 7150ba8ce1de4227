"""The device under test: how it is opened, whose code it is, and which kernels are its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hardpoint_platforms.binding import ask
from hardpoint_platforms.conformance.checks import Refused, Wrong
from hardpoint_platforms.device import Device
from hardpoint_platforms.discovery import PlatformEntry, discover
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.platform import Platform
from hardpoint_platforms.reference.providers import reference_blocks, reference_providers
from hardpoint_platforms.selection import parse_request, select
from hardpoint_platforms.validation import check_device, check_methods, check_probe

#: The distribution whose own kernels the reference ops are.
SPI_DISTRIBUTION = "hardpoint-platforms"


@dataclass
class Subject:
    """A platform, and one device of it that is opened when it is first asked for.

    Attributes:
        entry: name, distribution and version; platform: what the hook returned; index: of the device.
        options: for `open`, checked against the manifest already.
        folders: folders of the plugin's own source, for naming lines.
        installed: whether it came through an entry point, so that another process can load it by name.
    """

    entry: PlatformEntry
    platform: Platform
    index: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    installed: bool = False
    _device: Device | None = field(default=None, repr=False)

    @property
    def request(self) -> str:
        """What people write after --device."""
        return f"{self.entry.name}:{self.index}" if self.index else self.entry.name

    @property
    def device(self) -> Device:
        """The opened device, validated. Raises PluginError, DeviceUnavailable."""
        if self._device is None:
            self._device = self.fresh()
        return self._device

    def fresh(self) -> Device:
        """Another opening of the same device; the caller closes it."""
        return check_device(self.entry, self.platform.open(self.index, self.options), CONTRACTS)

    def forget(self) -> None:
        """Let go of the device without closing it: something of it hangs."""
        self._device = None

    def close(self) -> None:
        """Close the device if it was opened."""
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def providers(self, op: str) -> list[OpProvider]:
        """Its own providers of `op`, best first.

        The reference's kernels are own ones where the platform is of the same distribution as they are.
        """
        own = list(self.device.providers())
        if not own and self.entry.distribution == SPI_DISTRIBUTION:
            own = list(reference_providers(self.device.torch_device))
        return [provider for provider in own if provider.op == op]

    def claim(self, instance: OpInstance) -> OpProvider:
        """The first own provider that takes `instance`. Raises Refused with every reason, Wrong for a bad answer."""
        candidates = self.providers(instance.op)
        reasons = []
        for provider in candidates:
            answer: Any
            answer, again = (ask(CONTRACTS[instance.op], provider, instance) for _ in range(2))
            if not isinstance(answer, Support):
                told = f"supports() returned {answer!r:.60}, not a Support"
                raise Wrong(told, subject_code=type(provider).supports)
            if answer != again:
                raise Wrong("supports() answers the same question in two ways", subject_code=type(provider).supports)
            if answer:
                return provider
            if not answer.reason:
                raise Wrong("supports() says no without a reason", subject_code=type(provider).supports)
            reasons.append(f"{provider.name}: {answer.reason}")
        raise Refused("; ".join(reasons) or "no provider implements it; the reference takes it")


def oracle(op: str) -> OpProvider:
    """The reference's provider of `op`, on the host."""
    return next(provider for provider in (*reference_providers(), *reference_blocks()) if provider.op == op)


def named(request: str, options: Mapping[str, Any] | None = None) -> Subject:
    """The installed platform that `request` ("cpu", "acme:1") names.

    Raises PluginError, DeviceUnavailable as selection does; PlatformError for a wrong option.
    """
    from hardpoint_platforms.options import validate_options

    registry = discover()
    name, _ = parse_request(request)
    chosen = select(request, registry)
    entry = registry.entry(chosen.platform if name is None else name)
    platform = registry.load(entry.name)
    checked = validate_options(entry.manifest, options or {}) if entry.manifest else {}
    return Subject(entry, platform, chosen.index, checked, _folders(entry), installed=True)


def of_platform(platform: Platform, name: str, distribution: str, folders: Sequence[str] = ()) -> Subject:
    """A platform object that is not installed: for the kit's own tests, and for plugins' unit tests."""
    module = type(platform).__module__
    entry = PlatformEntry(name, distribution, "0", module)
    check_methods(entry, platform, Platform)
    found = check_probe(entry, platform.probe())
    if not found.devices:
        raise Refused("; ".join(found.reasons) or f"{name} finds no device")
    home = getattr(
        importlib.import_module(module) if module not in sys.modules else sys.modules[module], "__file__", ""
    )
    return Subject(entry, platform, found.devices[0].index, {}, tuple(folders) or (str(home),))


def _folders(entry: PlatformEntry) -> tuple[str, ...]:
    spec = find_spec(entry.value.partition(":")[0].strip().partition(".")[0])
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places and spec is not None and spec.origin:
        places = [spec.origin]
    return tuple(str(Path(place)) for place in places)
