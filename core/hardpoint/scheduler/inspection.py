"""`check_integrity` of the whole scheduler: do queue, rows, pager and requests agree?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.errors import EngineError
from hardpoint.kv.groups import columns_of
from hardpoint.kv.prefix_cache import HashChain
from hardpoint.request.request import Request, Status

if TYPE_CHECKING:
    from hardpoint.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise EngineError for the first thing that does not agree."""
    scheduler.rows.check_integrity()
    scheduler.waiting.check_integrity()
    scheduler.pager.check_integrity()
    counted = scheduler.num_running + scheduler.num_waiting
    if counted != len(scheduler.requests):
        raise EngineError(f"scheduler: {len(scheduler.requests)} requests live, {counted} are somewhere")
    if not scheduler.num_running and scheduler.pager.used_pages:
        raise EngineError(f"scheduler: nobody runs, {scheduler.pager.used_pages} pages are in use")
    for request in scheduler.requests.values():
        if request.finished or request.known > max(request.max_total, request.prompt_length):
            raise EngineError(f"scheduler: request {request.id} is {request.status.value}, {request.known} tokens")
        if request.status is Status.RUNNING:
            _check_running(scheduler, request)
        elif request.status is Status.PARKED and request.parent not in scheduler.requests:
            raise EngineError(f"scheduler: request {request.id} waits for a parent that is gone")
        elif request.in_flight != sum(request in step.requests for step in scheduler.submitted):
            raise EngineError(f"scheduler: request {request.id} waits for {request.in_flight} results")


def _check_running(scheduler: Scheduler, request: Request) -> None:
    rows, pager, row = scheduler.rows, scheduler.pager, request.row
    serial, computed = int(rows.serial[row]), int(rows.computed[row])
    flying = sum(serial in step.serials.tolist() for step in scheduler.submitted)
    if flying != int(rows.in_flight[row]):
        raise EngineError(f"scheduler: row {row} counts {int(rows.in_flight[row])} steps in flight, there are {flying}")
    columns = int(pager.columns[row])
    if columns * pager.page_tokens < computed:
        raise EngineError(f"scheduler: row {row} has {columns} pages for {computed} computed tokens")
    # one column of slack: a step that was put off keeps the page it got
    if columns > columns_of(max(computed, 1), pager.page_tokens) + 1:
        raise EngineError(f"scheduler: row {row} has {columns} pages for {computed} computed tokens: waste")
    if not pager.prefix_caching:
        return
    digests = _checked_digests(request, pager.page_tokens)
    full = min(len(digests), computed // pager.page_tokens)
    for group in range(len(pager.windows)):
        for column, name in enumerate(pager.names_of(row, group)):
            if name is not None and (column >= full or name != digests[column]):
                raise EngineError(
                    f"scheduler: page of row {row}, column {column} is cached under a wrong name, or early"
                )


def _checked_digests(request: Request, page_tokens: int) -> list[bytes]:
    """The request's own hash chain, its last link hashed anew: checked at each step, that covers all of it."""
    full = request.known // page_tokens
    digests = list(request.digests(full, page_tokens))[:full]
    if full:
        again = HashChain(request.cache_salt)
        again.digests = digests[: full - 1]
        again.extend(request.tokens((full - 1) * page_tokens, full * page_tokens), page_tokens)
        if again.digests[-1] != digests[-1]:
            raise EngineError(f"scheduler: the hash chain of request {request.id} does not fit its tokens")
    return digests
