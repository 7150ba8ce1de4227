"""A deployment under traffic: which replica takes which request, and what came out. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hardpoint.errors import ConfigError
from hardpoint.kv.pager import KVPager
from hardpoint.request.request import Request
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.settings import SchedulerSettings
from hardpoint.simulate.cost import StepCost
from hardpoint.simulate.replica import Finished, Replica, StepLog
from hardpoint.simulate.traffic import Traffic

ROUTINGS = ("round-robin", "least-loaded")


@dataclass(frozen=True)
class Deployment:
    """What runs.

    Attributes:
        cost: of a step on one replica.
        windows: of the cache groups. num_pages: of one replica, page 0 among them.
        settings: of each replica's scheduler.
        overhead: seconds of the host per step.
        leaping: see `simulate.leap`; off only to check it.
    """

    cost: StepCost
    settings: SchedulerSettings
    windows: tuple[int | None, ...]
    num_pages: int
    page_tokens: int = 16
    prefix_caching: bool = True
    overlap: bool = True
    overhead: float = 0.0
    routing: str = "round-robin"
    leaping: bool = True

    def replica(self) -> Replica:
        """A fresh one."""
        pager = KVPager(self.num_pages, self.page_tokens, self.windows, self.prefix_caching)
        return Replica(
            self.settings, pager, self.cost, overlap=self.overlap, overhead=self.overhead, leaping=self.leaping
        )


@dataclass(frozen=True)
class Outcome:
    """What came out.

    Attributes:
        finished: of all replicas, by index. refused: (index, reason).
        logs: the steps of each replica.
        preemptions, prefix_queries, prefix_hits: of all replicas.
    """

    replicas: int
    usable_pages: int
    finished: list[Finished]
    refused: list[tuple[int, str]]
    logs: list[StepLog] = field(repr=False)
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


def run(
    deployment: Deployment, traffic: Traffic, replicas: int, progress: Callable[[int], None] | None = None
) -> Outcome:
    """Replay `traffic` on that many replicas. progress: called with the requests routed so far.

    Round robin: request n goes to replica n mod replicas. Least loaded: to the one with the fewest requests that have
    not ended, the first of several. Raises ConfigError for an unknown routing.
    """
    if deployment.routing not in ROUTINGS:
        raise ConfigError(f"--routing is {deployment.routing!r}; known are {', '.join(ROUTINGS)}")
    fleet = [deployment.replica() for _ in range(replicas)]
    if deployment.routing == "round-robin":
        for number, replica in enumerate(fleet):
            for index in range(number, len(traffic), replicas):
                _arrive(replica, traffic, index)
            replica.advance(float("inf"))
            if progress is not None:
                progress(len(range(number, len(traffic), replicas)))
    else:
        _balance(fleet, traffic, progress)
    return _outcome(fleet)


def _balance(fleet: list[Replica], traffic: Traffic, progress: Callable[[int], None] | None) -> None:
    """Least loaded. A replica is brought up to an arrival only if one of its requests may have ended by then."""
    quiet = [replica.quiet_until() for replica in fleet]
    for index, arrival in enumerate(traffic.arrival.tolist()):
        for number, replica in enumerate(fleet):
            if quiet[number] <= arrival:
                replica.advance(arrival)
                quiet[number] = replica.quiet_until()
        number = min(range(len(fleet)), key=lambda number: fleet[number].outstanding)
        _arrive(fleet[number], traffic, index)
        quiet[number] = fleet[number].quiet_until()
        if progress is not None:
            progress(1)
    for replica in fleet:
        replica.advance(float("inf"))


def _arrive(replica: Replica, traffic: Traffic, index: int) -> None:
    arrival = float(traffic.arrival[index])
    replica.advance(arrival)
    params = SamplingParams(max_tokens=int(traffic.output[index]), ignore_eos=True, seed=0)
    replica.add(index, Request(id=str(index), prompt=traffic.prompt_tokens(index), params=params, arrival=arrival))


def _outcome(fleet: list[Replica]) -> Outcome:
    finished = sorted((one for replica in fleet for one in replica.finished), key=lambda one: one.index)
    pagers = [replica.scheduler.pager for replica in fleet]
    return Outcome(
        replicas=len(fleet),
        usable_pages=pagers[0].usable_pages,
        finished=finished,
        refused=sorted(pair for replica in fleet for pair in replica.refused),
        logs=[replica.log for replica in fleet],
        preemptions=sum(replica.scheduler.preemptions for replica in fleet),
        prefix_queries=sum(pager.queries for pager in pagers),
        prefix_hits=sum(pager.hits for pager in pagers),
    )


def most_at_once(outcome: Outcome) -> int:
    """Most requests that any replica had at once, running and waiting."""
    return max((int(np.add(log.running, log.waiting).max()) for log in outcome.logs if log.running), default=0)
