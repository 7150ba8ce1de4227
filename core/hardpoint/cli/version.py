"""Versions of everything that matters in a bug report. Imports none of it."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, distributions, version

from hardpoint_platforms.versioning import INTERFACES

_PACKAGES = ("hardpoint", "hardpoint-platforms", "torch", "transformers", "tokenizers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint version`."""
    parser.add_argument("--json", action="store_true", help="as JSON")


def versions() -> dict[str, str]:
    """Package -> version ("not installed"), Python and the plugins' packages among them. Reads metadata alone."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if any(point.group == "hardpoint.platforms" for point in distribution.entry_points):
            found.setdefault(name, distribution.version)
    return found


def execute(args: argparse.Namespace) -> int:
    """Print them."""
    found = versions()
    interfaces = {name: str(number) for name, number in INTERFACES.items()}
    if args.json:
        print(json.dumps({"versions": found, "interfaces": interfaces}))
        return 0
    for name, number in found.items():
        print(f"{name:<22} {number}")
    print(f"{'device interfaces':<22} {', '.join(f'{name} {number}' for name, number in interfaces.items())}")
    return 0
