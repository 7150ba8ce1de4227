"""Requests that do not run: the waiting queue, children parked behind their parents, and deadlines."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from itertools import pairwise

from hardpoint.errors import EngineError
from hardpoint.request.request import Request, Status


class WaitingQueue:
    """Requests in the order of their keys. A preempted request returns to its old place."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, request: Request) -> None:
        """Queue it. Keys are unique, so requests themselves are never compared."""
        insort(self._entries, (request.key, request), key=_entry_key)

    def head(self) -> Request | None:
        """The first, or None."""
        return self._entries[0][1] if self._entries else None

    def remove(self, request: Request) -> None:
        """Take it out."""
        place = bisect_left(self._entries, request.key, key=_entry_key)
        if place == len(self._entries) or self._entries[place][1] is not request:
            raise EngineError(f"request {request.id} is not in the waiting queue")
        del self._entries[place]

    def check_integrity(self) -> None:
        """Raise EngineError unless sorted and only requests that wait are in it."""
        keys = [key for key, _ in self._entries]
        if any(a >= b for a, b in pairwise(keys)):
            raise EngineError("waiting queue: not sorted, or a key twice")
        for key, request in self._entries:
            if request.status not in (Status.WAITING, Status.PREEMPTED) or key != request.key or request.row != -1:
                raise EngineError(f"waiting queue: request {request.id} is {request.status.value}")


def _entry_key(entry: tuple[tuple[int, int], Request]) -> tuple[int, int]:
    return entry[0]


class Nursery:
    """Children that wait until their parent's prompt is computed, so that they can share its pages."""

    def __init__(self) -> None:
        self._children: dict[str, list[Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, parent: str) -> bool:
        return parent in self._children

    def park(self, child: Request) -> None:
        """Keep a child until its parent is ready or gone."""
        child.move(Status.PARKED)
        self._children.setdefault(child.parent or "", []).append(child)
        self._count += 1

    def release(self, parent: str) -> list[Request]:
        """Children of a parent that is ready or gone; they wait from now on."""
        children = self._children.pop(parent, [])
        for child in children:
            child.move(Status.WAITING)
        self._count -= len(children)
        return children

    def remove(self, child: Request) -> None:
        """Take one out that has ended."""
        siblings = self._children[child.parent or ""]
        siblings.remove(child)
        if not siblings:
            del self._children[child.parent or ""]
        self._count -= 1


class Deadlines:
    """When requests run out of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[int, int], Request]] = []

    def push(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline_at is not None:
            heapq.heappush(self._heap, (request.deadline_at, request.key, request))

    def due(self, now: float) -> list[Request]:
        """Those whose deadline has come, without those that ended before it."""
        due: list[Request] = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].finished):
            request = heapq.heappop(self._heap)[2]
            if not request.finished:
                due.append(request)
        return due
