"""The scheduler: decides for each step who computes how many tokens, on which pages.

Owns the requests from `add` until they end, the rows of running ones, and (through the pager) their pages. The life of
a step: `schedule` makes a frozen plan and counts it as done at once; the worker runs plans in order; `engine.update`
calls `complete` with each result, in order, and `finish` for requests that ended by it. `schedule` may be called again
before earlier results are in. Because plans run in order, a page freed now may be given away now: whoever wrote to it
in an earlier plan is done before the next owner starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hardpoint.errors import EngineError, RequestError
from hardpoint.kv.pager import KVPager, Match
from hardpoint.request.request import Request, Status
from hardpoint.scheduler.admission import Admission, fit
from hardpoint.scheduler.inspection import check_scheduler
from hardpoint.scheduler.plan import Int32s, NewSequence, StepPlan
from hardpoint.scheduler.policy import order_key
from hardpoint.scheduler.preemption import displaceable, victim
from hardpoint.scheduler.queue import Deadlines, Nursery, WaitingQueue
from hardpoint.scheduler.rows import RowTable
from hardpoint.scheduler.selection import Selection
from hardpoint.scheduler.settings import SchedulerSettings
from hardpoint.scheduler.sharing import Sharing

#: Attempts per call: preemption may leave an attempt empty-handed, never two in a row.
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class SubmittedStep:
    """A plan without result: its number, its requests in batch order, and the serials of their rows (int64)."""

    step: int
    requests: list[Request]
    serials: npt.NDArray[np.int64]


class Scheduler:
    """See the module. Not thread-safe: the engine loop owns it.

    Attributes:
        rows, waiting, nursery: running, waiting and parked requests.
        submitted: plans without result, oldest first.
        preemptions, prompt_tokens, generated_tokens: counted since the start.
    """

    def __init__(self, settings: SchedulerSettings, pager: KVPager) -> None:
        self.settings = settings
        self.pager = pager
        self.admission = Admission(settings, pager.windows, pager.page_tokens, pager.usable_pages)
        self.rows = RowTable(settings.max_rows)
        self.waiting = WaitingQueue()
        self.nursery = Nursery()
        self.requests: dict[str, Request] = {}
        self.submitted: deque[SubmittedStep] = deque()
        self._sharing = Sharing(self.requests, self.rows, pager)
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._key = order_key(settings.policy)
        self._deadlines = Deadlines()
        self._released: list[int] = []
        self._serial = 0
        self._step = 0
        self._now = 0.0
        self._prefilled_alone = False

    @property
    def has_work(self) -> bool:
        """Whether a request lives or a result is still to come."""
        return bool(self.requests or self.submitted)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self.rows)

    @property
    def num_waiting(self) -> int:
        """Requests without a row: waiting, preempted or parked."""
        return len(self.waiting) + len(self.nursery)

    # Coming and going

    def add(self, request: Request) -> None:
        """Take a request. Raises RequestError (PromptTooLong, TooManyRequests) for one that can never be served."""
        if request.id in self.requests:
            raise RequestError(f"request id {request.id!r} is in use", field="request_id")
        self.admission.check(request, self.num_waiting)
        parent = self._sharing.parent(request)
        self._serial += 1
        request.key = self._key(request, self._serial)
        request.max_total = self.admission.max_total(request)
        request.max_output = request.max_total - request.prompt_length
        self.requests[request.id] = request
        self._deadlines.push(request)
        if parent is not None and not self._sharing.prompt_computed(parent):
            self.nursery.park(request)
        else:
            self.waiting.push(request)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is. False if there is none of that id (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.finish(request, "abort", self._now)
        return True

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has come, with finish reason "timeout"; returns them."""
        due = self._deadlines.due(now)
        for request in due:
            self.finish(request, "timeout", now)
        return due

    def finish(self, request: Request, reason: str, now: float, *, forget: bool = False) -> None:
        """End a request: its row and pages are free at once, its results still under way will be dropped.

        forget: its pages are not to be trusted; they leave the prefix cache.
        """
        if request.status is Status.RUNNING:
            row = self.rows.leave(request)
            self._released.append(row)
            self.pager.close(row, forget)
        elif request.status is Status.PARKED:
            self.nursery.remove(request)
        else:
            self.waiting.remove(request)
        request.move(Status.FINISHED)
        request.finish_reason = reason
        request.finished_at = now
        del self.requests[request.id]
        self._wake_children(request.id)

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes; returns the pages freed."""
        return self.pager.reset_prefix_cache()

    # One step
    #
    # The law: every request catches up `computed` to `known` (prompt, output, and draws in flight) under one token
    # budget. A prompt, a chunk of it, the rest after a prefix hit or a preemption, and a decode differ only in how far
    # they are behind. One token behind: all of them first, there is always budget for them (see `max_rows`). Further
    # behind: in policy order, running and waiting alike, as far as budget and pages go. A row that catches up draws the
    # next token, so that it is one behind again. Pages go by policy order: the last in it yields (see `preemption`).

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to do before a result comes in. now: seconds, engine's clock.

        Raises EngineError if requests wait, nothing is under way and still nobody can run: a bug, never a load.
        """
        self._now = now
        for _ in range(_ATTEMPTS):
            plan = self._commit(self._select(now))
            if plan is not None or self.submitted or not self.requests:
                return plan
        raise EngineError(f"scheduler is stuck: {self.num_running} running, {self.num_waiting} waiting, none can go on")

    def _select(self, now: float) -> Selection:
        selection = Selection(self.settings, len(self.rows.requests), now)
        ones, many = self._split()
        if not self.settings.limits.mixed:
            self._select_one_shape(selection, ones, many)
            return selection
        self._take_ones(selection, ones)
        entered = self._take_chunks(selection, self._split()[1] if selection.pressure else many)
        # Chunking off: a whole prompt found too little left. Every other step it goes without the decodes.
        if selection.starved and not entered and not self.settings.chunked_prefill and not self._prefilled_alone:
            selection.restart()
            self._prefilled_alone = self._take_chunks(selection, self._split()[1])
            if not self._prefilled_alone:
                self._take_ones(selection, self._split()[0])
        else:
            self._prefilled_alone = False
        return selection

    def _select_one_shape(self, selection: Selection, ones: Int32s, many: Int32s) -> None:
        """For devices that cannot mix: steps with prefills and steps with decodes take turns while there are both."""
        if not self._prefilled_alone or not len(ones):
            selection.shape = "many"
            self._prefilled_alone = self._take_chunks(selection, many)
            if self._prefilled_alone:
                return
        selection.shape = "one"
        self._prefilled_alone = False
        self._take_ones(selection, self._split()[0])
        self._take_chunks(selection, many[:0])

    def _split(self) -> tuple[Int32s, Int32s]:
        """Running rows that are one token behind, and those further behind, in policy order."""
        order = self.rows.order()
        want = self.rows.want(order)
        return order[want == 1], order[want > 1]

    def _take_ones(self, selection: Selection, rows: Int32s) -> None:
        """Take rows that are one token behind, and get them pages where they reach a new one."""
        table = self.rows
        short = self.pager.short(rows, table.computed[rows] + 1)
        if len(short):
            stalled = set()
            for request in table.tenants(short):
                if request.row >= 0 and not self._grow(request, selection):
                    stalled.add(request.row)
            alive = [row for row in rows.tolist() if table.requests[row] is not None and row not in stalled]
            rows = np.array(alive, dtype=np.int32)
        selection.take_ones(rows)

    def _grow(self, request: Request, selection: Selection) -> bool:
        """A page for the next token of a row, from others that come after it if need be."""
        row = request.row
        while not self.pager.extend(row, int(self.rows.computed[row]) + 1):
            if not self._yield_pages(request, selection):
                return False
        return True

    def _yield_pages(self, claimant: Request, selection: Selection) -> bool:
        """Preempt the last in order. False if that was the claimant, or if it is alone and has to wait for results."""
        selection.pressure = True
        loser = victim(self.rows, claimant)
        if loser is None:
            return False
        self._preempt(loser, selection)
        return loser is not claimant

    def _take_chunks(self, selection: Selection, rows: Int32s) -> bool:
        """Take running rows that are several tokens behind, and let waiting requests in, in policy order.

        Whether any row was taken.
        """
        before = selection.budget
        behind = [self.rows.at(row) for row in reversed(rows.tolist())]
        admitting = True
        while selection.budget > 0 and selection.slots > 0:
            head = self.waiting.head() if admitting else None
            if behind and (head is None or behind[-1].key < head.key):
                request = behind.pop()
                taken = request.row < 0 or selection.query[request.row]
                if not taken and not self._advance(request, selection):
                    break
            elif head is not None:
                admitting = self._admit(head, selection)
            else:
                break
        return selection.budget < before

    def _advance(self, request: Request, selection: Selection) -> bool:
        """Take a chunk of a running request, as budget and free pages allow. False if the budget allows none."""
        row, table = request.row, self.rows
        computed = int(table.computed[row])
        want = min(int(table.known[row]), int(table.target[row])) - computed
        query = self.settings.chunk(want, selection.budget)
        if not query:
            selection.starved = True
            return False
        while True:
            fits = self.settings.chunk(want, min(query, self.pager.room(row) - computed))
            if fits:
                self.pager.extend(row, computed + fits)
                selection.take(row, fits)
                return True
            if not self._yield_pages(request, selection):
                return True

    def _admit(self, request: Request, selection: Selection) -> bool:
        """Let a waiting request in, if there are a row and pages for all its tokens. Whether the next may try."""
        if request.in_flight or selection.pressure:
            return False
        while True:
            match = self._sharing.match(request)
            query = self.settings.chunk(request.known - match.tokens, selection.budget)
            if not query or not selection.allows(query):
                selection.starved = not query
                return False
            query, lacking = fit(self.settings, self.rows, self.pager, request, match, query)
            if not lacking and not self.rows.full:
                self._enter(request, match, query, selection)
                return True
            loser = displaceable(self.rows, self.pager, request, lacking)
            if loser is None:
                return False
            self._preempt(loser, selection)

    def _enter(self, request: Request, match: Match, query: int, selection: Selection) -> None:
        self.waiting.remove(request)
        row = self.rows.enter(request, match.tokens)
        self.pager.open(row, match)
        if not self.pager.extend(row, match.tokens + query):
            raise EngineError(f"pager has no pages for request {request.id} although it was let in")
        selection.take(row, query)
        selection.new.append(request)
        if request.cached_tokens is None:
            request.cached_tokens = match.tokens
            request.first_scheduled = selection.now
            self.prompt_tokens += request.prompt_length
            if not request.wants_prompt_logprobs:
                self.pager.count_lookup(request.prompt_length, match.tokens)

    def _preempt(self, request: Request, selection: Selection) -> None:
        """Take a request's row and pages; it waits again, and not before its results under way are in will it run."""
        row = request.row
        request.in_flight = int(self.rows.in_flight[row])
        self.rows.leave(request)
        self.pager.close(row)
        if not selection.drop(row, request):
            self._released.append(row)
        request.move(Status.PREEMPTED)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.push(request)

    def _commit(self, selection: Selection) -> StepPlan | None:
        """Make the plan, and count it as done."""
        table = self.rows
        rows = selection.rows(table.order())
        if not len(rows):
            return None
        query, computed, known = selection.query[rows], table.computed[rows], table.known[rows]
        done = computed + query
        samples = (done == known) & (known < table.limit[rows])
        table.computed[rows] = done
        table.known[rows] = known + samples
        table.in_flight[rows] += 1
        self._step += 1
        requests = table.tenants(rows)
        self.submitted.append(SubmittedStep(self._step, requests, table.serial[rows]))
        released, self._released = tuple(self._released), []
        return StepPlan(
            step=self._step,
            released=released,
            new=tuple(_new_sequence(request) for request in selection.new),
            rows=rows,
            query_lengths=query,
            computed=computed,
            samples=samples,
            page_tables=self.pager.snapshot(rows),
        )

    # Results

    def complete(self, plan: StepPlan, bad_rows: Sequence[int] = ()) -> list[Request]:
        """A result is in: caches the pages it filled, frees those that slid out. Returns the plan's requests, in order.

        Call it in the order of the plans, before the drawn tokens are noted. bad_rows: batch indices whose values are
        not to be trusted.
        """
        if not self.submitted or self.submitted[0].step != plan.step:
            raise EngineError(f"result of step {plan.step} came out of order")
        batch = self.submitted.popleft()
        live = self.rows.serial[plan.rows] == batch.serials
        rows, done = plan.rows, plan.computed + plan.query_lengths
        if not live.all():
            for index in np.flatnonzero(~live).tolist():
                request = batch.requests[index]
                if request.status is Status.PREEMPTED:
                    request.in_flight -= 1
        self.rows.in_flight[rows[live]] -= 1
        if len(self.nursery):
            for request, end in zip(batch.requests, done.tolist(), strict=True):
                if end >= request.prompt_length and request.id in self.nursery:
                    self._wake_children(request.id)
        if bad_rows:
            live[list(bad_rows)] = False
        self._settle(rows[live], done[live])
        return batch.requests

    def _settle(self, rows: Int32s, done: Int32s) -> None:
        """Tokens [0, done) of each row are known and computed for good."""
        if self.pager.prefix_caching:
            for index in self.pager.unregistered(rows, done).tolist():
                row = int(rows[index])
                self.pager.register(row, self._sharing.digests(self.rows.at(row)), int(done[index]))
        self.pager.slide(rows, done)

    def _wake_children(self, parent: str) -> None:
        for child in self.nursery.release(parent):
            self.waiting.push(child)

    def check_integrity(self) -> None:
        """Raise EngineError unless every owner's invariants hold, and the owners agree with each other."""
        check_scheduler(self)


def _new_sequence(request: Request) -> NewSequence:
    return NewSequence(
        row=request.row,
        request_id=request.id,
        tokens=request.tokens(0, request.known),
        prompt_length=request.prompt_length,
        params=request.params,
    )
