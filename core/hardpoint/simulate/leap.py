"""Many equal decode steps at once, with exactly the result of stepping through them.

While every running request only decodes, nobody waits, nobody ends and nobody arrives, the scheduler has nothing to
decide: each step takes every row, computes one token of each, and draws the next. What changes is added up here, and
the pager is called as the scheduler would call it, in its order: a page where a row reaches a new column, a name for
each column that fills. Before pages run short, a request ends or the time is up, stepping goes on.

Not used with sliding windows, where pages are given back all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hardpoint.request.request import Request
from hardpoint.scheduler.plan import StepPlan
from hardpoint.simulate.cost import Attended

if TYPE_CHECKING:
    from hardpoint.simulate.replica import Replica

#: Tokens that the device draws from.
VOCABULARY = 32000
#: Fewer steps are not worth the bookkeeping.
LEAST = 4
#: More are done in several leaps.
MOST = 4096


@dataclass(frozen=True)
class _Run:
    """What a leap starts from: the last plan, its requests and rows, and the tokens computed before the next step."""

    plan: StepPlan
    requests: list[Request]
    rows: list[int]
    computed: list[int]


def leap(replica: Replica, until: float) -> bool:
    """Advance as many steps as can be before `until`; False if fewer than `LEAST` can."""
    plan = replica.steady
    if plan is None or len(replica.clock.flying) != replica.depth:
        return False
    scheduler = replica.scheduler
    table, pager = scheduler.rows, scheduler.pager
    order = table.order()
    if len(order) != len(plan.rows) or any(step.plan is not plan for step in replica.clock.flying):
        return False
    most = int((table.limit[order] - table.known[order]).min()) - 1 + replica.depth
    if most < LEAST:
        return False
    most = min(most, MOST)
    requests = table.tenants(order)
    if not all(request.output and request.plain for request in requests):
        return False
    computed = table.computed[order]
    have = pager.columns[order]
    # room for all pages, or for the steps before they run short
    while int(np.maximum(-(-(computed + most) // pager.page_tokens) - have, 0).sum()) * len(pager.windows) > (
        pager.available_pages
    ):
        most //= 2
        if most < LEAST:
            return False
    run = _Run(plan, requests, order.tolist(), computed.tolist())
    new_columns = _new_columns(run, pager.page_tokens, have.tolist(), most)
    done = _pass_time(replica, run, new_columns, most, until)
    if not done:
        return False
    _catch_up(replica, run, new_columns, done)
    return True


def _new_columns(run: _Run, page_tokens: int, have: list[int], most: int) -> list[list[int]]:
    """Per step, the batch indices of rows that reach a new column in it."""
    reached: list[list[int]] = [[] for _ in range(most)]
    for index, (computed, columns) in enumerate(zip(run.computed, have, strict=True)):
        for step in range(columns * page_tokens - computed, most, page_tokens):
            reached[step].append(index)
    return reached


def _pass_time(replica: Replica, run: _Run, new_columns: list[list[int]], most: int, until: float) -> int:
    """Submit up to `most` steps and take their results, on the clock alone. Returns how many; 0 if fewer than LEAST.

    The same sums in the same order as `Replica.submit` and its results, so that not a bit differs.
    """
    clock, cost, log, scheduler = replica.clock, replica.cost, replica.log, replica.scheduler
    rows, now, free = len(run.rows), clock.now, clock.free
    ends = [step.end for step in clock.flying]
    read, pages, groups = sum(run.computed) + rows, scheduler.pager.used_pages, len(scheduler.pager.windows)
    starts: list[tuple[float, float, int]] = []
    for step in range(most):
        if now >= until:
            break
        attended: Attended = tuple((read, read) for _ in cost.windows)
        seconds = cost.seconds(rows, rows, attended)
        start = max(now + replica.overhead, free)
        end = start + seconds
        result = ends[0] if ends else end
        if result > until:
            break
        if ends:
            ends = [*ends[1:], end]
        pages += len(new_columns[step]) * groups
        starts.append((start, seconds, pages))
        free, now, read = end, max(now, result), read + rows
    if len(starts) < LEAST:
        return 0
    clock.now, clock.free = now, free
    for flying, end in zip(clock.flying, ends, strict=True):
        flying.end = end
    for start, seconds, used in starts:
        log.note(start, seconds, rows, 0, rows, used)
    return len(starts)


def _catch_up(replica: Replica, run: _Run, new_columns: list[list[int]], steps: int) -> None:
    """Bring requests, rows, pages and what is under way to where `steps` steps would have brought them."""
    scheduler, depth = replica.scheduler, replica.depth
    table, pager, size = scheduler.rows, scheduler.pager, scheduler.pager.page_tokens
    for request, row, computed in zip(run.requests, run.rows, run.computed, strict=True):
        first = row + computed + 1 - depth
        request.output.extend([token % VOCABULARY for token in range(first, first + steps)])
    filled = _filled(run, size, depth, steps) if pager.prefix_caching else {}
    for step in range(steps):
        for index in new_columns[step]:
            pager.extend(run.rows[index], run.computed[index] + step + 1)
        for index in filled.get(step, ()):
            digests = partial(run.requests[index].digests, page_tokens=size)
            pager.register(run.rows[index], digests, run.computed[index] - depth + step + 1)
    order = table.order()
    table.computed[order] += steps
    table.known[order] += steps
    scheduler.generated_tokens += steps * len(run.rows)
    # the plan that is under way is the last of the run now
    last = replace(run.plan, computed=run.plan.computed + np.int32(steps))
    for flying in replica.clock.flying:
        flying.plan = last
    replica.steady = last


def _filled(run: _Run, page_tokens: int, depth: int, steps: int) -> dict[int, list[int]]:
    """Per step, the batch indices of rows whose result fills a column in it."""
    filled: dict[int, list[int]] = {}
    for index, computed in enumerate(run.computed):
        for step in range(-(computed - depth + 1) % page_tokens, steps, page_tokens):
            filled.setdefault(step, []).append(index)
    return filled
