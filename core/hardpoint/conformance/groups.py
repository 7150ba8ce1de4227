"""The engine's groups of checks, for the entry point group `hardpoint.conformance` and for the command line."""

from __future__ import annotations

from hardpoint.conformance import ranks, scheduling, tiny
from hardpoint_platforms.conformance.checks import Group


def groups() -> tuple[Group, ...]:
    """The scheduler contract, whole tiny models, and the same cut over ranks."""
    return scheduling.GROUP, tiny.GROUP, ranks.GROUP
