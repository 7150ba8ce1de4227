"""The step under construction: who is in it so far and what is left of the budget."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hardpoint.request.request import Request
from hardpoint.scheduler.settings import SchedulerSettings

Int32s = npt.NDArray[np.int32]


class Selection:
    """Collects rows until the plan is made.

    Attributes:
        query: int32 [rows], tokens each row computes in this step; 0 is not in it.
        budget: tokens left.
        slots: requests with more than one token that may still come.
        new: requests that enter with this step.
        pressure: somebody had to yield pages, so nobody new comes in.
        starved: somebody found no budget left.
        shape: which rows the step may hold: "any", "many" (several tokens each) or "one" (one token each).
    """

    def __init__(self, settings: SchedulerSettings, rows: int, now: float) -> None:
        self._settings = settings
        self.now = now
        self.query: Int32s = np.zeros(rows, np.int32)
        self.budget = settings.budget
        self.slots = settings.prefill_slots
        self.new: list[Request] = []
        self.pressure = False
        self.starved = False
        self.shape = "any"

    def allows(self, query: int) -> bool:
        """Whether a row of that many tokens fits the step's shape."""
        return self.shape == "any" or (query > 1) == (self.shape == "many")

    def take_ones(self, rows: Int32s) -> None:
        """Rows that compute one token each."""
        self.query[rows] = 1
        self.budget -= len(rows)

    def take(self, row: int, query: int) -> None:
        """A row that computes `query` tokens."""
        self.query[row] = query
        self.budget -= query
        self.slots -= query > 1

    def drop(self, row: int, request: Request) -> bool:
        """Take a row out again; its budget is lost for this step. True if the worker has never heard of it."""
        self.query[row] = 0
        if request in self.new:
            self.new.remove(request)
            return True
        return False

    def restart(self) -> None:
        """Put all rows back, keeping who entered out of it: only for a selection without new requests."""
        self.query[:] = 0
        self.budget = self._settings.budget
        self.slots = self._settings.prefill_slots
        self.starved = False

    def rows(self, order: Int32s) -> Int32s:
        """int32: rows in the step, those of one token first, else in the given order."""
        query = self.query[order]
        many = query > 1
        return np.concatenate([order[query == 1], order[many]]) if many.any() else order[query == 1]
