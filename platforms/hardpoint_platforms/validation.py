"""Checks of what a plugin hands over: its hook, its platform, its device, its op providers.

The rule for methods is the subset rule: an implementation must accept the call that the core makes, by position and by
name; what it adds must have defaults. A mismatch is found here and not in the middle of a step.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pluggy

from hardpoint_platforms import hookspecs
from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.deprecation import warn_overrides
from hardpoint_platforms.device import Device, DeviceInfo
from hardpoint_platforms.discovery import PlatformEntry, guard, plugin_error
from hardpoint_platforms.guarding import place_of_code
from hardpoint_platforms.hookspecs import PROJECT
from hardpoint_platforms.ops.contract import OpContract
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_platforms.state_cache import StateCache
from hardpoint_platforms.versioning import Version

_HOOK = "hardpoint_platform"


def load_platform(entry: PlatformEntry) -> Platform | None:
    """Import the entry point, register its hook, call it and check what it returns.

    None means "not my machine". Raises PluginError, whatever the plugin does.
    """
    again = f"pip install --upgrade {entry.distribution}   (or --force-reinstall it)"
    with guard(entry, "import", f"importing {entry.value} failed", again):
        namespace = _resolve(entry)
    hook = _register(entry, namespace)
    with guard(entry, "import", f"{_HOOK}() failed", again):
        try:
            platforms = hook()
        except TypeError as error:
            if "abstract" not in str(error):
                raise
            raise plugin_error(entry, "validation", f"{_HOOK}(): {error}", again) from error
    # pluggy leaves None results out.
    if not platforms:
        return None
    platform = platforms[0]
    if not isinstance(platform, Platform):
        message = f"{_HOOK}() returned {platform!r:.80} ({type(platform).__name__}), not a Platform or None"
        raise plugin_error(entry, "validation", message, again)
    check_methods(entry, platform, Platform)
    return platform


def check_probe(entry: PlatformEntry, result: object) -> ProbeResult:
    """The probe's answer, if it is one. Raises PluginError."""
    if not isinstance(result, ProbeResult):
        raise plugin_error(entry, "probe", f"probe() returned {result!r:.80}, not a ProbeResult", _authors(entry))
    wrong = [d for d in result.devices if not isinstance(d, DeviceInfo) or d.platform != entry.name]
    if wrong:
        message = f"probe() lists {wrong[0]!r:.80}, which is not a DeviceInfo of platform {entry.name!r}"
        raise plugin_error(entry, "probe", message, _authors(entry))
    return result


def check_device(entry: PlatformEntry, device: object, contracts: Mapping[str, OpContract]) -> Device:
    """An opened device, its state cache and its providers. Raises PluginError for the first thing wrong."""
    if not isinstance(device, Device):
        raise plugin_error(entry, "validation", f"open() returned {device!r:.80}, not a Device", _authors(entry))
    check_methods(entry, device, Device)
    check_methods(entry, device.state_cache(), StateCache)
    _check_deprecations(entry, device.capabilities(), Capabilities)
    for provider in device.providers():
        check_provider(entry, provider, contracts)
    return device


def check_provider(entry: PlatformEntry, provider: object, contracts: Mapping[str, OpContract]) -> None:
    """Name, op, version and method signatures of one provider. Raises PluginError."""
    if not isinstance(provider, OpProvider):
        raise plugin_error(entry, "validation", f"providers() has {provider!r:.80}, not an OpProvider", _authors(entry))
    kind = type(provider).__name__
    for attribute, wanted in (("name", str), ("op", str), ("version", Version)):
        if not isinstance(getattr(provider, attribute, None), wanted):
            message = f"provider {kind}: {attribute} must be set, to a {wanted.__name__}"
            raise plugin_error(entry, "validation", message, _authors(entry))
    if provider.op not in contracts:
        known = ", ".join(sorted(contracts))
        raise plugin_error(
            entry, "validation", f"provider {kind} implements {provider.op!r}, known ops are: {known}", _authors(entry)
        )
    check_methods(entry, provider, OpProvider)


def check_methods(entry: PlatformEntry, subject: object, interface: type) -> None:
    """Hold each public method of `subject` against the one of `interface`. Raises PluginError.

    Warns of deprecated names that it overrides.
    """
    _check_deprecations(entry, subject, interface)
    for name, wanted in vars(interface).items():
        if name.startswith("_") or not inspect.isfunction(wanted):
            continue
        given = getattr(type(subject), name)
        if given is wanted:
            continue
        where = f"{type(subject).__name__}.{name}"
        if not callable(given):
            raise plugin_error(entry, "validation", f"{where} is not a method", _authors(entry))
        if not _accepts(given, wanted):
            place = place_of_code(given)
            message = (
                f"{where}{inspect.signature(given)} cannot take the core's call "
                f"{interface.__name__}.{name}{inspect.signature(wanted)}{f'; it is at {place}' if place else ''}"
            )
            raise plugin_error(entry, "validation", message, f"pip install --upgrade {entry.distribution}")


def _check_deprecations(entry: PlatformEntry, subject: object, interface: type) -> None:
    with guard(entry, "validation", "warnings are errors", f"pip install --upgrade {entry.distribution}"):
        warn_overrides(entry, subject, interface)


def _accepts(given: Callable[..., Any], wanted: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(wanted).parameters.values())
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    signature = inspect.signature(given)
    # `self` comes by position in both calls, whatever it is called; a static method cannot take it.
    try:
        signature.bind(*names, **keywords)
        signature.bind(names[0], **dict.fromkeys(names[1:]), **keywords)
    except TypeError:
        return False
    return True


def _resolve(entry: PlatformEntry) -> object:
    module_name, _, attributes = entry.value.partition(":")
    found: Any = importlib.import_module(module_name.strip())
    for attribute in filter(None, attributes.strip().split(".")):
        found = getattr(found, attribute)
    return SimpleNamespace(**{_HOOK: found}) if inspect.isroutine(found) else found


def _register(entry: PlatformEntry, namespace: object) -> Callable[[], list[Any]]:
    """pluggy checks the hook; each plugin gets a manager of its own, so that one cannot disturb another."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    with guard(entry, "validation", "its hooks do not fit", _authors(entry)):
        manager.register(namespace, name=entry.name)
        manager.check_pending()
    if not manager.hook.hardpoint_platform.get_hookimpls():
        message = f"{entry.value} has no `@hookimpl def {_HOOK}()`"
        raise plugin_error(entry, "validation", message, _authors(entry))
    hook: Callable[[], list[Any]] = manager.hook.hardpoint_platform
    return hook


def _authors(entry: PlatformEntry) -> str:
    return f"pip install --upgrade {entry.distribution}; if that does not help, tell its authors"
