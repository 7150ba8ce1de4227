"""The groups of checks: the kit's own, and those that other distributions register under `hardpoint.conformance`.

An entry point of that group is a `Group`, or a function that returns several. The engine registers the scheduler
contract and whole tiny models this way; where it is not installed, one verdict per absent group says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import importlib_metadata

from hardpoint_platforms.conformance import (
    attention,
    audit,
    collectives,
    contracts,
    memory,
    programs,
    sampling,
    state,
    transfer,
)
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Unverified
from hardpoint_platforms.conformance.subject import Subject

ENTRY_POINTS = "hardpoint.conformance"
_OWN = (
    audit.GROUP,
    memory.GROUP,
    contracts.GROUP,
    attention.GROUP,
    state.GROUP,
    programs.GROUP,
    sampling.GROUP,
    collectives.GROUP,
    transfer.GROUP,
)
#: Groups that need the engine: name, title, and the level that they stand at.
_ABSENT = (("scheduler", "scheduler contract", 0), ("models", "whole tiny models", 0))


def own_groups() -> tuple[Group, ...]:
    """What the kit brings."""
    return _OWN


def all_groups(given: Iterable[Group] = ()) -> tuple[Group, ...]:
    """The kit's groups, those `given`, and those registered; the first of a name counts."""
    found = {group.name: group for group in (*_OWN, *given)}
    for group in _registered():
        found.setdefault(group.name, group)
    for name, title, level in _ABSENT:
        found.setdefault(name, _absent(name, title, level))
    return tuple(found.values())


def _registered() -> Iterator[Group]:
    for point in importlib_metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = point.load()
            made = loaded() if callable(loaded) else loaded
        except Exception as error:
            yield _absent(point.name, point.name, 0, f"{point.value} cannot be loaded: {error}")
            continue
        yield from (made,) if isinstance(made, Group) else made


def _absent(name: str, title: str, level: int, reason: str = "hardpoint is not installed") -> Group:
    def body(subject: Subject, seed: int) -> Measure:
        raise Unverified(reason)

    return Group(name, title, lambda subject: (Check(name, name, "all", level, body),))
