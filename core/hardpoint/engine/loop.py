"""The engine loop. The life of a request, and who owns the queue that it is in:

 1. The front end submits an `EngineRequest`; it waits in the channel, which the process around this loop drains before
    each step (`engine/lifecycle.py`).
 2. `Engine.add` turns it into a `Request`, draws a seed if it has none, and gives it to the scheduler, which may
    refuse: the refusal is an output like any other and leaves with the next step.
 3. The scheduler's waiting queue holds it until rows and pages are free, then its running set, until it ends. Preempted
    requests go back to the waiting queue.
 4. Each step the scheduler makes a frozen `StepPlan` of running requests. The executor owns submitted plans and runs
    them in order; this loop holds at most one that is in flight.
 5. The `StepResult` goes to `update.apply`, which appends tokens to requests, ends those that are done, frees their
    pages, and makes one `TokenOutput` per request that has something new.
 6. `Outputs` leave through the channel; the front end makes text of them and may abort (a stop string, a client gone).
    An abort takes effect before the next step; draws of that request that are still in flight are dropped by 5.

Plain and overlapped stepping stand side by side below. Overlapped, step n + 1 is scheduled and submitted while n runs.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable

import msgspec

from hardpoint.engine.update import apply, ended
from hardpoint.errors import RequestError
from hardpoint.executor.base import Executor, StepHandle
from hardpoint.protocol.messages import STEP_SIZE_BOUNDS, EngineRequest, EngineStats, Outputs, TokenOutput
from hardpoint.request.request import Request
from hardpoint.scheduler.plan import StepPlan, StepResult
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint_platforms.streams import Clock


class Engine:
    """Owns scheduler and executor, and drives them. Used by one thread.

    overlap: schedule step n + 1 while step n runs. clock: the only source of time. seed: of the seeds that are drawn
    for requests without one; None takes the system's entropy. fallback_ops: for the gauge. named: what is to be told of
    an error that `step` raised: a plugin's with its name, op and line.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        overlap: bool,
        clock: Clock | None = None,
        seed: int | None = None,
        fallback_ops: int = 0,
        named: Callable[[Exception], Exception] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._advance = self._overlapped_step if overlap else self._plain_step
        self._clock = clock or Clock()
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._fallback_ops = fallback_ops
        self._named = named
        self._in_flight: tuple[StepPlan, StepHandle] | None = None
        self._early: list[TokenOutput] = []
        self._live: set[str] = set()
        self._steps = 0
        self._step_sizes = [0] * (len(STEP_SIZE_BOUNDS) + 1)
        self._step_tokens = 0
        self._step_seconds = 0.0
        self._schedule_seconds = 0.0
        self._closed = False
        #: Whether the last step could run nothing though requests are there.
        self.stalled = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._scheduler.has_work or self._in_flight is not None or bool(self._early)

    def add(self, request: EngineRequest) -> None:
        """Take a request. A refusal (PromptTooLong, TooManyRequests ...) comes as an output of the next step."""
        params = request.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
            request = msgspec.structs.replace(request, params=params)
        try:
            self._scheduler.add(Request.from_message(request, self._clock.now()))
        except RequestError as error:
            self._early.append(refused(request.request_id, error))
            return
        self.stalled = False
        self._live.add(request.request_id)

    def abort(self, request_id: str) -> bool:
        """Drop a request, without any further output. False if there is none of that id."""
        self.stalled = False
        self._live.discard(request_id)
        return self._scheduler.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget cached pages that no request uses."""
        self._scheduler.reset_prefix_cache()

    def catch_up(self) -> bool:
        """While there is no work: do a piece of what was put off at the start; whether any is left."""
        return self._executor.catch_up()

    def step(self) -> Outputs:
        """One round: what ended by deadline, what was refused, and the results of one step of the device.

        Raises what the executor raised; the engine cannot go on then (see `fail`).
        """
        outputs, self._early = self._early, []
        outputs.extend(ended(request) for request in self._scheduler.expire(self._clock.now()))
        outputs.extend(self._advance())
        for output in outputs:
            if output.finish_reason is not None:
                self._live.discard(output.request_id)
        return Outputs(outputs, self.stats())

    def _plain_step(self) -> list[TokenOutput]:
        """Schedule, run, wait, update."""
        plan = self._schedule()
        self.stalled = plan is None
        if plan is None:
            return []
        return self._update(plan, self._executor.submit(plan).result())

    def _overlapped_step(self) -> list[TokenOutput]:
        """Schedule and submit the next step while the one before runs; then wait for that one, and update."""
        plan = self._schedule()
        before = self._in_flight
        self._in_flight = None if plan is None else (plan, self._executor.submit(plan))
        self.stalled = plan is None and before is None
        if before is None:
            return []
        return self._update(before[0], before[1].result())

    def _schedule(self) -> StepPlan | None:
        started = time.perf_counter()
        plan = self._scheduler.schedule(self._clock.now())
        self._schedule_seconds += time.perf_counter() - started
        return plan

    def _update(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        started = time.perf_counter()
        outputs = apply(self._scheduler, plan, result, self._clock.now())
        size = int(plan.query_lengths.sum())
        self._steps += 1
        self._step_tokens += size
        self._step_sizes[bisect_left(STEP_SIZE_BOUNDS, size)] += 1
        self._step_seconds += result.seconds
        self._schedule_seconds += time.perf_counter() - started
        return outputs

    def named(self, error: Exception) -> Exception:
        """What is to be told of an error that `step` raised."""
        return error if self._named is None else self._named(error)

    def fail(self, message: str) -> Outputs:
        """The end of every request, after `step` raised."""
        outputs, self._early = self._early, []
        self._in_flight = None
        outputs += [TokenOutput(request_id=r, finish_reason="error", error=message) for r in sorted(self._live)]
        self._live.clear()
        return Outputs(outputs, EngineStats())

    def stats(self) -> EngineStats:
        """Gauges now, counters since the start."""
        scheduler, pager = self._scheduler, self._scheduler.pager
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            pages_total=pager.usable_pages,
            pages_used=pager.used_pages,
            pages_cached=pager.cached_pages,
            preemptions=scheduler.preemptions,
            prefix_queries=pager.queries,
            prefix_hits=pager.hits,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            steps=self._steps,
            step_seconds=self._step_seconds,
            schedule_seconds=self._schedule_seconds,
            fallback_ops=self._fallback_ops,
            step_sizes=tuple(self._step_sizes),
            step_tokens=self._step_tokens,
        )

    def close(self) -> None:
        """Let the step in flight end, and give the device back. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._in_flight = None
        self._executor.close()


def refused(request_id: str, error: RequestError) -> TokenOutput:
    """A refusal at admission as an output, so that the front end can raise it again."""
    return TokenOutput(
        request_id=request_id,
        finish_reason="error",
        error=error.message,
        error_kind=type(error).__name__,
        error_field=error.field,
    )
