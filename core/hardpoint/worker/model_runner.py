"""The model runner: a plan goes in, a step runs on the device, a result comes out.

    launch(plan)      rows enter and leave, batch is laid out, program runs, drawn ids go into the token table
    collect(flight)   waits for the step and brings ids and log-probabilities to the host

Nothing between the two waits for the device, so that the next plan may be launched before the last is collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.models.base import CausalModel
from hardpoint.scheduler.plan import RowLogprobs, StepPlan, StepResult
from hardpoint.worker.batch_builder import HostBatch, Int64s, build_host_batch
from hardpoint.worker.prompt_scores import PromptScorer, rows_to_host, with_chosen_first
from hardpoint.worker.sampling_batch import SamplingBatchBuilder
from hardpoint.worker.sequence_table import SequenceTable
from hardpoint_platforms.batch import Logprobs
from hardpoint_platforms.binding import OpTable
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.contract import Kernel
from hardpoint_platforms.program import Bucket, Program, StepInputs, StepOutputs, Weights
from hardpoint_platforms.state_cache import CacheLayout, State


@dataclass(frozen=True)
class RunnerParts:
    """What a runner is made of; see `hardpoint.worker.worker`, which makes it."""

    device: Device
    ops: OpTable
    model: CausalModel
    weights: Weights
    layout: CacheLayout
    state: State
    step: Callable[..., tuple[StepOutputs, State]]
    score: Kernel  # the bound `logprobs` op
    max_num_seqs: int
    max_model_len: int
    max_batch_tokens: int


@dataclass(frozen=True, eq=False)
class Flight:
    """A launched step whose results are still on the device. Holds all that collecting needs: the rows may change hands
    before.

    Attributes:
        sampled: places in the plan that draw; logprobs_wanted: top log-probabilities each asked, -1 for none.
        prompt_scores: by place in the plan.
    """

    plan: StepPlan
    outputs: StepOutputs
    sampled: tuple[int, ...]
    logprobs_wanted: tuple[int, ...]
    prompt_scores: dict[int, Logprobs]
    started: float


class ModelRunner:
    """Owns the device's weights, state and token table. Used by one thread at a time."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._device = parts.device
        self._state = parts.state
        self._table = SequenceTable(parts.device, parts.max_num_seqs, parts.max_model_len, parts.model.vocab_size)
        self._sampling = SamplingBatchBuilder(parts.device, self._table)
        self._scorer = PromptScorer(parts.device, parts.model, parts.score, parts.weights, self._table)
        self._table_width = -(-parts.max_model_len // parts.layout.page_tokens)
        builder = parts.device.programs()
        self._buckets = builder.buckets(parts.max_batch_tokens, parts.max_num_seqs)
        self._programs: dict[Bucket, Program] = {
            bucket: builder.build(parts.step, bucket) for bucket in self._buckets or (Bucket(0, 0),)
        }

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end."""
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> Flight:
        """Run a plan without waiting for the device."""
        started = time.perf_counter()
        for row in plan.released:
            self._table.release(row)
        for sequence in plan.new:
            self._table.enter(sequence)
        bucket = self._bucket(plan.num_tokens, len(plan.rows))
        batch = build_host_batch(
            plan, self._parts.layout.page_tokens, bucket if self._buckets else None, self._table_width
        )
        rows = plan.rows[batch.sampled].astype(np.int64)
        places = (plan.computed + plan.query_lengths)[batch.sampled].astype(np.int64)
        with torch.inference_mode():
            inputs = self._inputs(plan, batch, rows, places)
            outputs, self._state = self._programs[bucket].run(inputs, self._state, self._parts.weights)
            self._keep_draws(batch.num_sampled, rows, places, outputs)
            scores = self._scorer.launch(plan, outputs.hidden)
        sampled = batch.sampled[: batch.num_sampled]
        wanted = self._table.logprobs[plan.rows[sampled]]
        return Flight(plan, outputs, tuple(sampled.tolist()), tuple(wanted.tolist()), scores, started)

    def collect(self, flight: Flight) -> StepResult:
        """Wait for a launched step and bring its results to the host."""
        places = np.array(flight.sampled, np.int64)
        count = len(places)
        tokens = np.full(len(flight.plan.rows), -1, np.int64)
        finite = np.ones(0, np.bool_)
        with torch.inference_mode():
            if count:
                tokens[places] = self._device.to_host(flight.outputs.sample.token_ids[:count]).numpy()
                finite = self._device.to_host(flight.outputs.finite[:count]).numpy()
            return StepResult(
                step=flight.plan.step,
                tokens=tokens,
                logprobs=self._logprobs(flight),
                prompt_logprobs=self._scorer.collect(flight.prompt_scores),
                bad_rows=tuple(places[~finite].tolist()) if count else (),
                seconds=time.perf_counter() - flight.started,
            )

    def describe(self) -> str:
        """How steps run, in the words of the device's programs."""
        return "; ".join(dict.fromkeys(filter(None, (program.describe() for program in self._programs.values()))))

    def forget(self, row: int) -> None:
        """Empty a row outside any plan (after warm-up)."""
        self._table.release(row)

    def _bucket(self, tokens: int, requests: int) -> Bucket:
        if not self._buckets:
            return Bucket(0, 0)
        return next(b for b in self._buckets if b.tokens >= tokens and b.requests >= requests)

    def _inputs(self, plan: StepPlan, batch: HostBatch, drawn_rows: Int64s, drawn_at: Int64s) -> StepInputs:
        put = self._device.to_device
        rows, positions = put(torch.from_numpy(batch.rows)), put(torch.from_numpy(batch.positions))
        plans = tuple(planner.plan(batch.attention) for planner in self._parts.ops.planners)
        hidden_index = self._scorer.hidden_index(plan, batch.attention.query_start)
        return StepInputs(
            token_ids=self._table.tokens[rows, positions].long(),
            positions=positions,
            plans=plans,
            logits_index=put(torch.from_numpy(batch.logits_index)),
            sampling=self._sampling.build(drawn_rows, drawn_at),
            hidden_index=None if hidden_index is None else put(torch.from_numpy(hidden_index)),
        )

    def _keep_draws(self, count: int, rows: Int64s, places: Int64s, outputs: StepOutputs) -> None:
        """Write what was drawn into the token table, on the device; draws of padding go to the dump column."""
        if not count:
            return
        if count < len(places):
            places = np.where(np.arange(len(places)) < count, places, self._table.max_len)
        put = self._device.to_device
        index = (put(torch.from_numpy(rows)), put(torch.from_numpy(places)))
        self._table.tokens.index_put_(index, outputs.sample.token_ids.to(torch.int32))

    def _logprobs(self, flight: Flight) -> dict[int, RowLogprobs]:
        sample = flight.outputs.sample
        if sample.logprobs is None:
            return {}
        scores = rows_to_host(self._device, with_chosen_first(sample.logprobs, sample.token_ids))
        return {
            place: RowLogprobs(
                scores.token_ids[i : i + 1, : 1 + wanted],
                scores.logprobs[i : i + 1, : 1 + wanted],
                scores.ranks[i : i + 1],
            )
            for i, (place, wanted) in enumerate(zip(flight.sampled, flight.logprobs_wanted, strict=True))
            if wanted >= 0
        }
