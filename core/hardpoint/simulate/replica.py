"""One replica: the real scheduler and pager, driven on a virtual clock. The device is a number of seconds per step.

The loop is that of `engine.loop`, plain or overlapped:

    plain       schedule n | run n | update n | schedule n + 1 ...
    overlapped  schedule n + 1 while n runs; update n when it has run; so a request that arrives while n runs is first
                in the step after next

`advance(until)` goes on as far as events before `until` go: a step that would be scheduled at `until` or later waits,
so that whoever arrives then is in it.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from hardpoint.engine.update import apply
from hardpoint.errors import RequestError
from hardpoint.executor.null import NullExecutor
from hardpoint.kv.pager import KVPager
from hardpoint.request.request import Request
from hardpoint.scheduler.plan import StepPlan, StepResult
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings
from hardpoint.simulate.cost import StepCost
from hardpoint.simulate.leap import VOCABULARY, leap


class StepLog:
    """Every step of a replica, one entry each: start and length in seconds, requests running and waiting after it was
    scheduled, its tokens, and the pages in use."""

    def __init__(self) -> None:
        self.start, self.seconds = array("d"), array("d")
        self.running, self.waiting, self.tokens, self.pages = array("l"), array("l"), array("l"), array("l")

    def note(self, start: float, seconds: float, running: int, waiting: int, tokens: int, pages: int) -> None:
        """One step."""
        self.start.append(start)
        self.seconds.append(seconds)
        self.running.append(running)
        self.waiting.append(waiting)
        self.tokens.append(tokens)
        self.pages.append(pages)


@dataclass(frozen=True)
class Finished:
    """A request that ended. Seconds on the virtual clock; `output` tokens were drawn."""

    index: int
    arrival: float
    first_token: float
    finished: float
    output: int
    cached: int
    preemptions: int


@dataclass
class Flying:
    """A step on the device and when it has run."""

    plan: StepPlan
    end: float


@dataclass
class Clock:
    """Virtual time, in seconds. now: of the loop; free: when the device has run all that was submitted."""

    now: float = 0.0
    free: float = 0.0
    flying: deque[Flying] = field(default_factory=deque)


class Replica:
    """Owns scheduler, pager, clock and what became of the requests.

    overhead: seconds of the host per step. leaping: runs of equal decode steps are advanced at once (`simulate.leap`),
    with the same result.

    Attributes:
        finished: in the order of their ends. refused: (index, reason).
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        pager: KVPager,
        cost: StepCost,
        *,
        overlap: bool = True,
        overhead: float = 0.0,
        leaping: bool = True,
    ) -> None:
        self.scheduler = Scheduler(settings, pager)
        self.cost = cost
        self.depth = 1 if overlap else 0
        self.overhead = overhead
        self.clock = Clock()
        self.log = StepLog()
        self.finished: list[Finished] = []
        self.refused: list[tuple[int, str]] = []
        #: The rows of the last step if it held nothing but one decode of every running request.
        self.steady: StepPlan | None = None
        self._executor = NullExecutor(VOCABULARY)
        self._waits = False
        self._least = cost.least
        self._leaping = leaping and not any(pager.windows) and not any(cost.windows)
        self._index: dict[str, int] = {}

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self.scheduler.requests)

    def quiet_until(self) -> float:
        """A time before which none of its requests ends, in seconds: each waits for a result per token still to draw,
        and results are at least `cost.least` apart. Infinite where it has no request."""
        requests = self.scheduler.requests.values()
        left = min((request.max_output - len(request.output) for request in requests), default=None)
        return float("inf") if left is None else self.clock.now + (left - 1) * self._least

    def add(self, index: int, request: Request) -> None:
        """A request arrives; `advance` has been called with its arrival."""
        self.clock.now = max(self.clock.now, request.arrival)
        try:
            self.scheduler.add(request)
        except RequestError as error:
            self.refused.append((index, error.message))
            return
        self.steady = None
        self._index[request.id] = index

    def advance(self, until: float) -> None:
        """Go on to `until`, in seconds, or until nothing is left to do."""
        clock = self.clock
        while True:
            if self._waits:
                if clock.flying[0].end > until:
                    return
                self._take_result()
            elif clock.now >= until:
                return
            elif self._leaping and self.steady is not None and leap(self, until):
                continue
            elif not self._schedule():
                return

    def _schedule(self) -> bool:
        """Schedule a step, if there is one. False if there is nothing to do and nothing to wait for."""
        scheduler, clock = self.scheduler, self.clock
        plan = scheduler.schedule(clock.now)
        if plan is not None:
            tokens, rows = plan.num_tokens, len(plan.rows)
            attended = self.cost.attended(plan.query_lengths, plan.computed)
            self.submit(plan, tokens, self.cost.seconds(tokens, int(plan.samples.sum()), attended))
            only_decodes = tokens == rows == scheduler.num_running and not scheduler.num_waiting
            self.steady = plan if only_decodes and bool(plan.samples.all()) else None
        self._waits = bool(clock.flying) and (plan is None or len(clock.flying) > self.depth)
        return self._waits or plan is not None

    def submit(self, plan: StepPlan, tokens: int, seconds: float) -> None:
        """Put a step on the device, behind what is there."""
        clock, scheduler = self.clock, self.scheduler
        start = max(clock.now + self.overhead, clock.free)
        clock.free = start + seconds
        clock.flying.append(Flying(plan, clock.free))
        pages = scheduler.pager.used_pages
        self.log.note(start, seconds, scheduler.num_running, scheduler.num_waiting, tokens, pages)

    def draw(self, plan: StepPlan) -> StepResult:
        """The tokens of a step."""
        return self._executor.submit(plan).result()

    def _take_result(self) -> None:
        clock, scheduler = self.clock, self.scheduler
        step = clock.flying.popleft()
        self._waits = False
        clock.now = max(clock.now, step.end)
        before = len(scheduler.requests)
        requests = scheduler.submitted[0].requests
        apply(scheduler, step.plan, self.draw(step.plan), clock.now)
        if len(scheduler.requests) == before:
            return
        self.steady = None
        for request in requests:
            if request.finished and request.id in self._index:
                self.finished.append(_finished(self._index.pop(request.id), request))


def _finished(index: int, request: Request) -> Finished:
    end = request.finished_at or 0.0
    return Finished(
        index=index,
        arrival=request.arrival,
        first_token=end if request.first_token is None else request.first_token,
        finished=end,
        output=len(request.output),
        cached=request.cached_tokens or 0,
        preemptions=request.preemptions,
    )
