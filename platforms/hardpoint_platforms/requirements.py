"""Whether what a plugin leans on is there, read from installed metadata without importing anything."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name


@dataclass(frozen=True)
class MissingRequirement:
    """A requirement that is not met. `installed` is the version found, None for none."""

    requirement: str
    name: str
    installed: str | None

    def __str__(self) -> str:
        found = f"{self.name} {self.installed} is installed" if self.installed else "it is not installed"
        return f"needs {self.requirement}, {found}"


def unmet(requirements: Iterable[str]) -> list[MissingRequirement]:
    """Those of a distribution's requirements (PEP 508) that are not met here.

    Environment markers are evaluated without extras. A bare word may also be an import name.
    """
    found = (_check(text) for text in requirements)
    return [missing for missing in found if missing is not None]


def _check(text: str) -> MissingRequirement | None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return MissingRequirement(text, text, None)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    try:
        version = importlib_metadata.version(requirement.name)
    except importlib_metadata.PackageNotFoundError:
        importable = text.isidentifier() and importlib.util.find_spec(text) is not None
        return None if importable else MissingRequirement(_short(requirement), requirement.name, None)
    if version and not requirement.specifier.contains(version, prereleases=True):
        return MissingRequirement(_short(requirement), canonicalize_name(requirement.name), version)
    return None


def _short(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"
