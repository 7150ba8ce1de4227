"""Who comes first. Every order in the scheduler (queue, batch, victims) is the order of one key."""

from __future__ import annotations

from collections.abc import Callable

from hardpoint.request.request import Request

#: (request, serial number of its arrival) -> key; the lower key comes first.
OrderKey = Callable[[Request, int], tuple[int, int]]


def order_key(policy: str) -> OrderKey:
    """The key of a policy: fcfs goes by arrival, priority by priority and then arrival."""
    return _by_priority if policy == "priority" else _by_arrival


def outranks(first: Request, second: Request) -> bool:
    """Whether `first` may take the pages of a running `second`: by priority only, never by arrival.

    Under fcfs the first part of every key is 0, so nobody may.
    """
    return first.key[0] < second.key[0]


def _by_arrival(request: Request, serial: int) -> tuple[int, int]:
    return (0, serial)


def _by_priority(request: Request, serial: int) -> tuple[int, int]:
    return (request.priority, serial)
