"""From what came out to numbers: percentiles of latencies, throughput, use of the cache, over time and in all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hardpoint.simulate.fleet import Outcome

Floats = npt.NDArray[np.float64]
#: Shown and kept in JSON, beside mean and max.
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Series:
    """Over time, one entry per bin of `width` seconds; all replicas together.

    Attributes:
        time: the bins' starts.
        running, waiting: requests, mean over the bin.
        token_rate: tokens computed per second, of prompts and outputs.
        kv_use: share of all pages in use, mean over the bin.
    """

    width: float
    time: Floats
    running: Floats
    waiting: Floats
    token_rate: Floats
    kv_use: Floats


@dataclass(frozen=True)
class Summary:
    """Of one run. Seconds, tokens, and shares from 0 to 1.

    Attributes:
        ttft: arrival to first token. tpot: seconds per token after the first, of requests with two or more.
        latency: arrival to end.
        makespan: first arrival to last end.
        busy: share of the makespan in which a replica's device ran a step, mean.
        kv_mean, kv_peak: share of the pages in use, mean over busy time and highest of any replica.
        step_mean: seconds of a step. batch_mean: requests in a step.
    """

    replicas: int
    requests: int
    refused: int
    refusal: str
    prompt_tokens: int
    output_tokens: int
    makespan: float
    steps: int
    step_mean: float
    batch_mean: float
    busy: float
    kv_mean: float
    kv_peak: float
    preemptions: int
    prefix_hit_share: float
    ttft: Floats
    tpot: Floats
    latency: Floats

    @property
    def output_rate(self) -> float:
        """Output tokens per second of the makespan."""
        return self.output_tokens / self.makespan if self.makespan else 0.0

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.makespan if self.makespan else 0.0

    def samples(self, metric: str) -> Floats:
        """ttft, tpot or latency of each request."""
        return {"ttft": self.ttft, "tpot": self.tpot, "latency": self.latency}[metric]


def statistic(values: Floats, what: str) -> float:
    """ "p95", "p99.9", "mean" or "max" of values; NaN where there are none."""
    if not len(values):
        return math.nan
    if what == "mean":
        return float(values.mean())
    return float(values.max()) if what == "max" else float(np.percentile(values, float(what[1:])))


def summarize(outcome: Outcome, prompt_lengths: npt.NDArray[np.int64]) -> Summary:
    """prompt_lengths: int64 [requests], of the traffic."""
    ended = outcome.finished
    arrival = np.array([one.arrival for one in ended])
    first = np.array([one.first_token for one in ended])
    end = np.array([one.finished for one in ended])
    output = np.array([one.output for one in ended], np.int64)
    several = output > 1
    seconds = np.concatenate([np.asarray(log.seconds) for log in outcome.logs])
    running = np.concatenate([np.asarray(log.running, np.float64) for log in outcome.logs])
    pages = np.concatenate([np.asarray(log.pages, np.float64) for log in outcome.logs])
    makespan = float(end.max() - arrival.min()) if len(ended) else 0.0
    total = float(seconds.sum())
    return Summary(
        replicas=outcome.replicas,
        requests=len(ended),
        refused=len(outcome.refused),
        refusal=outcome.refused[0][1] if outcome.refused else "",
        prompt_tokens=int(prompt_lengths[[one.index for one in ended]].sum()) if ended else 0,
        output_tokens=int(output.sum()),
        makespan=makespan,
        steps=len(seconds),
        step_mean=total / len(seconds) if len(seconds) else 0.0,
        batch_mean=float(running.mean()) if len(seconds) else 0.0,
        busy=total / (makespan * outcome.replicas) if makespan else 0.0,
        kv_mean=float((pages * seconds).sum() / total / outcome.usable_pages) if total else 0.0,
        kv_peak=float(pages.max() / outcome.usable_pages) if len(seconds) else 0.0,
        preemptions=outcome.preemptions,
        prefix_hit_share=outcome.prefix_hits / outcome.prefix_queries if outcome.prefix_queries else 0.0,
        ttft=first - arrival,
        tpot=(end - first)[several] / (output[several] - 1),
        latency=end - arrival,
    )


def as_json(summary: Summary) -> dict[str, object]:
    """Every number, latencies as statistics."""
    plain: dict[str, object] = {
        name: getattr(summary, name)
        for name in (
            *("replicas", "requests", "refused", "refusal", "prompt_tokens", "output_tokens", "makespan", "steps"),
            *("step_mean", "batch_mean", "busy", "kv_mean", "kv_peak", "preemptions", "prefix_hit_share"),
            *("output_rate", "total_rate"),
        )
    }
    return plain | {metric: statistics(summary, metric) for metric in ("ttft", "tpot", "latency")}


def statistics(summary: Summary, metric: str) -> Mapping[str, float | None]:
    """mean, p50 ... max of a metric; None where no request has it."""
    values = summary.samples(metric)
    names = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    found = {name: statistic(values, name) for name in names}
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def series(outcome: Outcome, bins: int = 240) -> Series:
    """What went on over time. A step counts where it starts, with its length."""
    logs = [log for log in outcome.logs if len(log.start)]
    if not logs:
        empty = np.zeros(1)
        return Series(1.0, empty, empty, empty, empty, empty)
    end = max(log.start[-1] + log.seconds[-1] for log in logs)
    width = end / bins if end > 0 else 1.0
    running, waiting, tokens, pages = (np.zeros(bins) for _ in range(4))
    for log in logs:
        place = np.minimum((np.asarray(log.start) / width).astype(np.int64), bins - 1)
        seconds = np.asarray(log.seconds)
        running += np.bincount(place, np.asarray(log.running) * seconds, bins)
        waiting += np.bincount(place, np.asarray(log.waiting) * seconds, bins)
        tokens += np.bincount(place, np.asarray(log.tokens, np.float64), bins)
        pages += np.bincount(place, np.asarray(log.pages) * seconds, bins)
    return Series(
        width=width,
        time=np.arange(bins, dtype=np.float64) * width,
        running=running / width,
        waiting=waiting / width,
        token_rate=tokens / width,
        kv_use=pages / width / (outcome.usable_pages * outcome.replicas),
    )
