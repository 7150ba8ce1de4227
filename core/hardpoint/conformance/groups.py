"""The engine's groups of checks, for the entry point group `hardpoint.conformance` and for the command line."""

from __future__ import annotations

from hardpoint.conformance import scheduling, tiny
from hardpoint_platforms.conformance.checks import Group


def groups() -> tuple[Group, ...]:
    """The scheduler contract, and whole tiny models."""
    return scheduling.GROUP, tiny.GROUP
