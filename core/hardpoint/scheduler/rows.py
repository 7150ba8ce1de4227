"""The table of running requests: one row each, columns in numpy, so that a batch is handled at once.

tokens of a request      |<------ computed ------>|<-- query -->|               |
                         0                                    known          limit
                                                                      target = limit - 1

known     tokens that exist or will when the steps submitted so far are done (draws in flight count)
computed  tokens whose keys and values exist or will then
limit     no token is drawn at or past this count; so the last one, at limit - 1, need not be computed (target)
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from hardpoint.errors import EngineError
from hardpoint.request.request import Request, Status

Int32s = npt.NDArray[np.int32]


class RowTable:
    """Owns the rows.

    Attributes:
        requests: per row, its request or None.
        computed, known, limit, target: int32 [rows], see the picture.
        in_flight: int32 [rows], steps with this row that have no result yet.
        serial: int64 [rows], number of the admission that took the row, 0 while free: tells tenants of a row apart.
    """

    def __init__(self, rows: int) -> None:
        self.requests: list[Request | None] = [None] * rows
        self.computed: Int32s = np.zeros(rows, np.int32)
        self.known: Int32s = np.zeros(rows, np.int32)
        self.limit: Int32s = np.zeros(rows, np.int32)
        self.target: Int32s = np.zeros(rows, np.int32)
        self.in_flight: Int32s = np.zeros(rows, np.int32)
        self.serial: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        self._free = list(range(rows))
        self._running: list[tuple[tuple[int, int], int]] = []
        self._order: Int32s | None = None
        self._admissions = 0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def full(self) -> bool:
        """Whether no row is free."""
        return not self._free

    def order(self) -> Int32s:
        """int32: rows of running requests in policy order."""
        if self._order is None:
            self._order = np.array([row for _, row in self._running], dtype=np.int32)
        return self._order

    def last(self) -> Request:
        """The running request that comes last in policy order."""
        return self.at(self._running[-1][1])

    def at(self, row: int) -> Request:
        """The request in a row."""
        request = self.requests[row]
        if request is None:
            raise EngineError(f"row {row} is empty")
        return request

    def tenants(self, rows: Int32s) -> list[Request]:
        """The requests in these rows, all of which are taken."""
        requests = self.requests
        return [request for row in rows.tolist() if (request := requests[row]) is not None]

    def enter(self, request: Request, computed: int) -> int:
        """Give a request the lowest free row; `computed` of its tokens are there already."""
        row = heapq.heappop(self._free)
        self._admissions += 1
        self.requests[row] = request
        self.computed[row] = computed
        self.known[row] = request.known
        self.limit[row] = request.max_total
        self.target[row] = max(request.prompt_length, request.max_total - 1)
        self.in_flight[row] = 0
        self.serial[row] = self._admissions
        request.row = row
        request.move(Status.RUNNING)
        insort(self._running, (request.key, row))
        self._order = None
        return row

    def leave(self, request: Request) -> int:
        """Take a request out of its row; returns the row."""
        row = request.row
        del self._running[bisect_left(self._running, (request.key, row))]
        self._order = None
        self.requests[row] = None
        self.serial[row] = self.computed[row] = self.known[row] = self.limit[row] = self.target[row] = 0
        self.in_flight[row] = 0
        request.row = -1
        heapq.heappush(self._free, row)
        return row

    def want(self, rows: Int32s) -> Int32s:
        """int32: tokens each row has still to compute."""
        return np.minimum(self.known[rows], self.target[rows]) - self.computed[rows]

    def check_integrity(self) -> None:
        """Raise EngineError unless rows, requests and counters agree."""
        taken = {row for _, row in self._running}
        if len(taken) != len(self._running) or taken & set(self._free):
            raise EngineError("rows: a row is taken twice, or taken and free")
        if len(taken) + len(self._free) != len(self.requests) or self._running != sorted(self._running):
            raise EngineError("rows: a row is lost, or the order is broken")
        for row, request in enumerate(self.requests):
            if (request is None) != (row not in taken) or (request is None and self.serial[row]):
                raise EngineError(f"rows: row {row} is {'taken' if row in taken else 'free'} and holds {request}")
            if request is not None:
                self._check_row(row, request)

    def _check_row(self, row: int, request: Request) -> None:
        computed, known, limit = int(self.computed[row]), int(self.known[row]), int(self.limit[row])
        drawn = known - request.known
        if request.row != row or request.status is not Status.RUNNING:
            raise EngineError(f"rows: request {request.id} in row {row} is {request.status.value}")
        if not 0 <= computed <= int(self.target[row]) or computed > known or known > limit:
            raise EngineError(f"rows: row {row} has computed {computed}, known {known}, limit {limit}")
        if not 0 <= drawn <= int(self.in_flight[row]):
            raise EngineError(f"rows: row {row} has {drawn} draws in {int(self.in_flight[row])} steps in flight")
