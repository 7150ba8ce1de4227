"""Service level objectives, and how many replicas meet them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from hardpoint.errors import ConfigError
from hardpoint.simulate.summary import Summary, statistic

_TERM = re.compile(
    r"(?P<metric>ttft|tpot|latency)_(?P<what>mean|max|p\d{1,2}(?:\.\d+)?)\s*<=?\s*"
    r"(?P<limit>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>ms|s)?"
)


@dataclass(frozen=True)
class Objective:
    """One limit: `what` (p95, mean, max ...) of `metric` (ttft, tpot, latency) is to stay below `limit` seconds."""

    metric: str
    what: str
    limit: float

    @property
    def name(self) -> str:
        """As it is written."""
        return f"{self.metric}_{self.what}"

    def value(self, summary: Summary) -> float:
        """What a run came to, in seconds; NaN where no request has the metric."""
        return statistic(summary.samples(self.metric), self.what)

    def met(self, summary: Summary) -> bool:
        """Whether a run stays below. A metric that no request has is met: one-token outputs have no tpot."""
        return not self.counts(summary) or self.value(summary) < self.limit

    def counts(self, summary: Summary) -> bool:
        """Whether any request has the metric."""
        return not math.isnan(self.value(summary))


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """ "ttft_p95<0.5,tpot_p95<30ms". Raises ConfigError with the term that is wrong."""
    found = []
    for term in text.split(","):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ConfigError(
                f"--slo {text!r}: cannot read {term.strip()!r}",
                hint='write terms such as "ttft_p95<0.5,tpot_p95<0.03": ttft, tpot or latency; mean, max or pNN; '
                "seconds, or ms",
            )
        limit = float(match["limit"]) / (1e3 if match["unit"] == "ms" else 1.0)
        if limit <= 0:
            raise ConfigError(f"--slo {text!r}: the limit of {match['metric']}_{match['what']} must be above 0")
        found.append(Objective(match["metric"], match["what"], limit))
    return tuple(found)


def meets(objectives: tuple[Objective, ...], summary: Summary) -> bool:
    """Whether a run refused nobody and stayed below every limit."""
    return not summary.refused and all(objective.met(summary) for objective in objectives)


@dataclass(frozen=True)
class Search:
    """Attributes:
    replicas: fewest that meet the objectives; None where none up to `tried` do.
    tried: (replicas, summary) in the order tried.
    """

    replicas: int | None
    tried: tuple[tuple[int, Summary], ...]

    @property
    def best(self) -> Summary:
        """Of the answer, or of the most replicas tried."""
        found = dict(self.tried)
        return found[self.replicas if self.replicas is not None else max(found)]


def find_replicas(objectives: tuple[Objective, ...], most: int, run: Callable[[int], tuple[Summary, int]]) -> Search:
    """Fewest replicas that meet the objectives: doubled from 1 until they do, then halved between.

    run: a summary, and the most requests that any replica had at once. Where that is 1 and the objectives are not met,
    more replicas change nothing and the search ends. More replicas are taken never to be worse: a routing for which
    that fails can hide a smaller answer.
    """
    tried: list[tuple[int, Summary]] = []

    def good(replicas: int) -> tuple[bool, int]:
        summary, crowd = run(replicas)
        tried.append((replicas, summary))
        return meets(objectives, summary), crowd

    low, high = 0, 1
    while True:
        found, crowd = good(high)
        if found:
            break
        if high >= most or crowd <= 1:
            return Search(None, tuple(tried))
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle)[0]:
            high = middle
        else:
            low = middle
    return Search(high, tuple(tried))
