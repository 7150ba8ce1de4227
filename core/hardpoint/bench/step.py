"""What a step costs besides the device: scheduler, pager and update, with an executor that computes nothing.

A crowd of requests is kept running: whenever one ends, another arrives, so that steps hold decodes and chunks of
prompts, admissions and ends. Half of each prompt is a prefix shared by all, so that the prefix cache has work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from hardpoint.engine.update import apply
from hardpoint.executor.null import NullExecutor
from hardpoint.kv.pager import KVPager
from hardpoint.request.request import Request
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings


@dataclass(frozen=True)
class Percentiles:
    """Of a sample, in milliseconds."""

    median: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True)
class StepCost:
    """What `run` measured.

    Attributes:
        requests: running at once.
        steps: measured.
        tokens_per_step: mean.
        decode_steps: steps that held only decodes.
        schedule, update, total: per step. Each step counts once, whatever it held.
        decode_total: likewise over the decode steps alone.
        prefix_hit_share: prompt tokens found in the prefix cache.
        preemptions: during the run.
    """

    requests: int
    steps: int
    tokens_per_step: float
    decode_steps: int
    schedule: Percentiles
    update: Percentiles
    total: Percentiles
    decode_total: Percentiles
    prefix_hit_share: float
    preemptions: int


class _Crowd:
    """Makes requests one after another; the n-th is the same in every run."""

    def __init__(self, prompt_tokens: int, output_tokens: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._prefix = self._random.integers(0, 32000, prompt_tokens // 2, dtype=np.int32)
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._made = 0

    def next(self, now: float) -> Request:
        tail = self._random.integers(0, 32000, self._prompt_tokens - len(self._prefix), dtype=np.int32)
        length = int(self._random.integers(max(1, self._output_tokens // 2), self._output_tokens * 3 // 2 + 1))
        self._made += 1
        return Request(
            id=f"bench-{self._made}",
            prompt=np.concatenate([self._prefix, tail]),
            params=SamplingParams(max_tokens=length, ignore_eos=True, seed=self._made),
            arrival=now,
        )


def run(
    requests: int = 64,
    *,
    steps: int = 600,
    warmup: int = 300,
    prompt_tokens: int = 512,
    output_tokens: int = 256,
    max_batch_tokens: int = 2048,
    page_tokens: int = 16,
    windows: tuple[int | None, ...] = (None,),
    prefix_caching: bool = True,
    seed: int = 0,
) -> StepCost:
    """Measure `steps` steps of `requests` running requests, after `warmup` steps. Raises ConfigError for bad sizes."""
    longest = prompt_tokens + output_tokens * 2
    settings = SchedulerSettings(max_batch_tokens=max_batch_tokens, max_num_seqs=requests, max_model_len=longest)
    num_pages = 1 + 2 * requests * len(windows) * (longest // page_tokens + 1)
    scheduler = Scheduler(settings, KVPager(num_pages, page_tokens, windows, prefix_caching))
    executor, crowd = NullExecutor(), _Crowd(prompt_tokens, output_tokens, seed)
    schedule, update, tokens, decode = np.zeros(steps), np.zeros(steps), np.zeros(steps, int), np.zeros(steps, bool)
    clock = time.perf_counter
    for index in range(-warmup, steps):
        for _ in range(requests - len(scheduler.requests)):
            scheduler.add(crowd.next(clock()))
        started = clock()
        plan = scheduler.schedule(started)
        planned = clock()
        if plan is None:
            continue
        result = executor.submit(plan).result()
        drawn = clock()
        apply(scheduler, plan, result, drawn)
        ended = clock()
        if index >= 0:
            schedule[index], update[index] = planned - started, ended - drawn
            tokens[index], decode[index] = plan.num_tokens, plan.num_tokens == len(plan.rows)
    pager = scheduler.pager
    return StepCost(
        requests=requests,
        steps=steps,
        tokens_per_step=float(tokens.mean()),
        decode_steps=int(decode.sum()),
        schedule=_percentiles(schedule),
        update=_percentiles(update),
        total=_percentiles(schedule + update),
        decode_total=_percentiles((schedule + update)[decode]),
        prefix_hit_share=pager.hits / pager.queries if pager.queries else 0.0,
        preemptions=scheduler.preemptions,
    )


def _percentiles(seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Percentiles:
    values = seconds * 1e3 if len(seconds) else np.zeros(1)
    median, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Percentiles(median, p90, p99, float(values.mean()))
