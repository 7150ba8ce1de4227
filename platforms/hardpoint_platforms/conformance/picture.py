"""A picture of loaded modules: which object every name of theirs stands for, functions by their code.

Two pictures differ where somebody patched something. As a program it loads one platform between two pictures:
`python -m hardpoint_platforms.conformance.picture NAME` prints what it imported and changed, as JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
import time
from types import ModuleType
from typing import Any

#: Packages that no plugin may change.
CORE = ("hardpoint", "hardpoint_platforms")
_KIT = "hardpoint_platforms.conformance"

Picture = dict[str, int]


def picture(packages: tuple[str, ...]) -> Picture:
    """name -> identity, for all names of the loaded modules of these packages and of their classes."""
    found: Picture = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and _belongs(name, packages) and not _belongs(name, (_KIT,)):
            for key, value in list(vars(module).items()):
                _add(found, f"{name}.{key}", value, name)
    return found


def differences(before: Picture, after: Picture) -> list[str]:
    """Names that stand for something else now, or are gone. Names of modules that came since do not count."""
    return sorted(name for name, mark in before.items() if after.get(name) != mark)


def _add(found: Picture, name: str, value: Any, module: str) -> None:
    if name.rpartition(".")[2].startswith("__") or isinstance(value, ModuleType):
        return
    found[name] = _mark(value)
    if inspect.isclass(value) and value.__module__ == module:
        for key, member in list(vars(value).items()):
            if not key.startswith(("__", "_abc_")) or key in ("__init__", "__call__", "__getattr__"):
                found[f"{name}.{key}"] = _mark(member)


def _mark(value: Any) -> int:
    """Functions count as the same while their code is; tables while they hold the same objects."""
    if inspect.isfunction(value):
        return id(value.__code__)
    if isinstance(value, dict) and len(value) < 200:
        return hash((id(value), *((str(key), id(item)) for key, item in value.items())))
    return id(value)


def _belongs(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _import_all(package: str) -> None:
    """Import every module of a package that can be imported here."""
    home = importlib.import_module(package)
    for module in pkgutil.walk_packages(home.__path__, f"{package}."):
        if not _belongs(module.name, (_KIT,)) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def main() -> int:
    """Load the platform that the first argument names, between two pictures."""
    from hardpoint_platforms.conformance.subject import named

    _import_all("hardpoint_platforms")
    loaded, before = set(sys.modules), picture(CORE)
    started = time.perf_counter()
    subject = named(sys.argv[1])
    device = subject.device
    for provider in device.providers():
        provider.planner()
    device.state_cache(), device.programs()
    device.close()
    seconds = time.perf_counter() - started
    imported = sorted(name for name in set(sys.modules) - loaded if _belongs(name, ("hardpoint",)))
    print(json.dumps({"imported": imported, "changed": differences(before, picture(CORE)), "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
