"""Who yields. A request never waits for pages held by one that comes after it.

The victim is the running request that comes last in policy order: under fcfs the one that arrived last, under priority
the last of the lowest priority. It loses its pages and computes them again later; its tokens stay. The first request
in policy order is never a victim, so something always gets on, and every request ends up first: no livelock.
"""

from __future__ import annotations

import numpy as np

from hardpoint.kv.pager import KVPager
from hardpoint.request.request import Request
from hardpoint.scheduler.policy import outranks
from hardpoint.scheduler.rows import RowTable


def victim(rows: RowTable, claimant: Request) -> Request | None:
    """Who yields so that a running claimant gets pages: maybe itself. None if it runs alone: then it can only wait."""
    if len(rows) == 1 and claimant.row >= 0:
        return None
    return rows.last()


def displaceable(rows: RowTable, pager: KVPager, claimant: Request, pages: int) -> Request | None:
    """Who yields so that a waiting claimant of higher priority can start, or None.

    pages: how many it lacks. None too if all that it outranks together give too few: then nobody yields in vain. Each
    gives the pages that it alone holds, and those that `admission.fit` keeps free for it.
    """
    if not len(rows) or not outranks(claimant, rows.last()):
        return None
    freed = 0
    for row in reversed(rows.order().tolist()):
        if not outranks(claimant, rows.at(row)):
            break
        kept = len(pager.windows) + pager.pending(np.array([row], np.int32), rows.known[[row]])
        freed += pager.exclusive_pages(row) + kept
        if freed >= pages:
            return rows.last()
    return rows.last() if freed >= pages else None
