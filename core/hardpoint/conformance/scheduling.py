"""Group `scheduler`: in 10,000 random traces no batch that the device's limits forbid, and nobody starves.

Level 0: the limits are data that the core obeys, so that no vendor needs a scheduler. The device is not asked to
compute; a stand-in draws random tokens.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np

from hardpoint.engine.update import apply
from hardpoint.errors import RequestError
from hardpoint.kv.pager import KVPager
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.request import Request
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import StepPlan, StepResult
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings, StepLimits
from hardpoint_platforms.capabilities import BatchLimits
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Wrong
from hardpoint_platforms.conformance.subject import Subject

TRACES, PARTS = 10_000, 10
_VOCAB = 11


class Forbidden(Exception):
    """A plan that the limits do not allow."""


def checks(subject: Subject) -> Iterator[Check]:
    """The traces in ten parts."""
    for part in range(PARTS):
        first = part * TRACES // PARTS
        name = f"traces {first} to {first + TRACES // PARTS - 1}"
        yield Check("scheduler", "scheduler", name, 0, partial(_traces, first), patience=300.0)


def _traces(first: int, subject: Subject, seed: int) -> Measure:
    limits = subject.device.capabilities().limits
    steps = 0
    for number in range(first, first + TRACES // PARTS):
        try:
            steps += play(limits, random.Random(f"{seed}/{number}"))
        except Forbidden as error:
            raise Wrong(f"trace {number}: {error}") from error
    return Measure(f"{steps} steps")


def play(limits: BatchLimits, rng: random.Random) -> int:
    """Run one random trace to its end. Returns its steps; raises Forbidden."""
    settings = random_settings(limits, rng)
    windows = rng.choice(((None,), (None,), (None, 6), (5,)))
    page_tokens = rng.choice((1, 2, 4, 8))
    least = len(windows) * (2 + -(-settings.min_chunk // page_tokens))
    roomy = len(windows) * -(-settings.max_model_len // page_tokens)
    pages = 1 + max(least, rng.choice((roomy, roomy, 2 * roomy)))
    scheduler = Scheduler(settings, KVPager(pages, page_tokens, windows, rng.random() < 0.7))
    device = StandIn(limits, rng)
    waiting = deque(random_messages(settings, rng))
    pending: deque[tuple[StepPlan, StepResult]] = deque()
    depth, tick, steps = rng.choice((0, 1, 2)), 0, 0
    bound = 200 + 6 * sum(len(message.prompt) + settings.max_model_len for message in waiting)
    while waiting or scheduler.has_work:
        tick += 1
        if tick > bound:
            raise Forbidden(f"a request starves under {limits}")
        while waiting and rng.random() < 0.6:
            try:
                scheduler.add(Request.from_message(waiting.popleft(), float(tick)))
            except RequestError:
                continue  # too long for the pool: refused at the door, as it should be
        plan = scheduler.schedule(float(tick))
        if plan is not None:
            pending.append((plan, device.run(plan)))
            steps += 1
        if pending and (plan is None or len(pending) > depth):
            apply(scheduler, *pending.popleft(), float(tick))
    scheduler.check_integrity()
    return steps


def random_settings(limits: BatchLimits, rng: random.Random) -> SchedulerSettings:
    """Settings that a user may choose on a device of these limits."""
    own = StepLimits(**dataclasses.asdict(limits))
    chunk = max(limits.prefill_chunk_multiple, 2)
    return SchedulerSettings(
        max_batch_tokens=chunk * rng.choice((1, 2, 4, 16)),
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_model_len=rng.choice((12, 30, 60)),
        chunked_prefill=rng.random() < 0.8,
        policy=rng.choice(("fcfs", "priority")),
        limits=own,
    )


def random_messages(settings: SchedulerSettings, rng: random.Random) -> list[EngineRequest]:
    """Up to five requests, some of which begin alike."""
    stem = [rng.randrange(_VOCAB) for _ in range(24)]
    messages = []
    for number in range(rng.randint(1, 5)):
        prompt = stem[: rng.choice((0, 4, 8, 16))] + [rng.randrange(_VOCAB) for _ in range(rng.randint(1, 14))]
        params = SamplingParams(seed=number, max_tokens=rng.randint(1, 10), ignore_eos=True)
        messages.append(
            EngineRequest(request_id=f"r{number}", prompt=prompt, params=params, priority=rng.randint(-1, 1))
        )
    return messages


class StandIn:
    """Takes plans as a worker would, checks each against the limits, and draws random tokens."""

    def __init__(self, limits: BatchLimits, rng: random.Random) -> None:
        self._limits, self._rng = limits, rng
        self._known: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Raises Forbidden."""
        for row in plan.released:
            del self._known[row]
        for new in plan.new:
            self._known[new.row] = len(new.tokens)
        self._check(plan)
        tokens = np.full(len(plan.rows), -1, np.int64)
        for place, row in enumerate(plan.rows.tolist()):
            if plan.samples[place]:
                tokens[place] = self._rng.randrange(_VOCAB)
                self._known[row] += 1
        return StepResult(plan.step, tokens)

    def _check(self, plan: StepPlan) -> None:
        limits, query = self._limits, plan.query_lengths
        tokens, requests, many = plan.num_tokens, len(plan.rows), int((query > 1).sum())
        _at_most("tokens", tokens, limits.max_tokens)
        _at_most("requests", requests, limits.max_requests)
        _at_most("tokens", tokens, limits.token_buckets[-1] if limits.token_buckets else None)
        _at_most("requests", requests, limits.request_buckets[-1] if limits.request_buckets else None)
        _at_most("prefills", many, limits.max_prefill_requests)
        if not limits.mixed and many not in (0, requests):
            raise Forbidden(f"{many} prefills and {requests - many} decodes in one step, though mixed is False")
        for row, count, computed in zip(plan.rows.tolist(), query.tolist(), plan.computed.tolist(), strict=True):
            if computed + count < self._known[row] and count % limits.prefill_chunk_multiple:
                raise Forbidden(f"a chunk of {count}, not a multiple of {limits.prefill_chunk_multiple}")


def _at_most(what: str, count: int, most: int | None) -> None:
    if most is not None and count > most:
        raise Forbidden(f"{count} {what} in one step, at most {most} are allowed")


GROUP = Group("scheduler", "scheduler contract", checks, beside=True)
