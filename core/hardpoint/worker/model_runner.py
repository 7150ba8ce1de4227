"""The model runner: a plan goes in, a step runs on the device, a result comes out.

    launch(plan)      rows enter and leave, batch is laid out, programs run, drawn ids go into the token table
    collect(flight)   waits for the step and brings ids and log-probabilities to the host

Nothing between the two waits for the device, so that the next plan may be launched before the last is collected. A
model that is cut over several devices waits where one hands its activations to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import NewSequence, RowLogprobs, StepPlan, StepResult
from hardpoint.worker.batch_builder import HostBatch, Int64s, build_host_batch
from hardpoint.worker.prompt_scores import PromptScorer, rows_to_host, with_chosen_first
from hardpoint.worker.sampling_batch import SamplingBatchBuilder
from hardpoint.worker.sequence_table import SequenceTable
from hardpoint.worker.stage import Stage, StageParts
from hardpoint_platforms.batch import Logprobs
from hardpoint_platforms.ops.contract import Kernel
from hardpoint_platforms.program import Bucket, SamplingShape, StepInputs, StepOutputs


@dataclass(frozen=True)
class RunnerParts:
    """What a runner is made of; see `hardpoint.worker.worker`, which makes it.

    Attributes:
        stages: in the order of the layers; the last one draws.
        score: the bound `logprobs` op of the last stage.
        max_num_seqs: rows; max_model_len: tokens of a row; max_batch_tokens: of a step.
    """

    stages: tuple[StageParts, ...]
    score: Kernel
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
    """Owns the stages and the token table, which lies on the last stage's device. Used by one thread at a time."""

    def __init__(self, parts: RunnerParts) -> None:
        self._stages = tuple(
            Stage(stage, parts.max_batch_tokens, parts.max_num_seqs, draws=stage is parts.stages[-1])
            for stage in parts.stages
        )
        self._last = last = self._stages[-1]
        self._device = last.device
        self._page_tokens = parts.stages[-1].layout.page_tokens
        self._table = SequenceTable(last.device, parts.max_num_seqs, parts.max_model_len, last.model.vocab_size)
        self._sampling = SamplingBatchBuilder(last.device, self._table)
        self._scorer = PromptScorer(last.device, last.model, parts.score, last.weights, self._table)
        self._table_width = -(-parts.max_model_len // self._page_tokens)

    def warm_up(self, groups: int, progress: Callable[[float], None] | None = None) -> None:
        """Make all programs ready, then run one prefill and one decode into page 0: what cannot run fails now.

        groups: cache groups of the layout.
        """
        length = min(8, self._table.max_len - 1)
        sequence = NewSequence(0, "warm-up", np.zeros(length, np.int32), length, SamplingParams(temperature=0.0))
        tables = tuple(np.zeros((1, length // self._page_tokens + 1), np.int32) for _ in range(groups))

        def step(number: int, query: int, computed: int, new: tuple[NewSequence, ...] = ()) -> StepPlan:
            return StepPlan(
                step=number,
                released=(),
                new=new,
                rows=np.zeros(1, np.int32),
                query_lengths=np.array([query], np.int32),
                computed=np.array([computed], np.int32),
                samples=np.ones(1, np.bool_),
                page_tables=tables,
            )

        first = step(-3, 1, 0)
        self._table.enter(sequence)
        with torch.inference_mode():
            for stage in self._stages:
                stage.prepare(lambda bucket, stage=stage: self._blank(stage, first, bucket), progress)  # type: ignore[misc]
        self.forget(0)
        self.execute(step(-2, length, 0, (sequence,)))
        self.execute(step(-1, 1, length))
        self.forget(0)

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
        with torch.inference_mode():
            carried: tuple[torch.Tensor, ...] = ()
            for stage in self._stages[:-1]:
                _, outputs = self._run(stage, plan, SamplingShape.ANY, carried)
                carried = tuple(stage.device.to_host(tensor) for tensor in outputs.carried)
            batch, outputs = self._run(self._last, plan, self._needs(plan), carried)
            self._keep_draws(plan, batch, outputs)
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

    @property
    def fixed_shapes(self) -> bool:
        """Whether what a request may ask of sampling is limited by the shape of the device's programs."""
        return self._last.fixed_shapes

    def describe(self) -> str:
        """How steps run, in the words of the devices' programs."""
        return "; ".join(dict.fromkeys(said for stage in self._stages for said in stage.describe()))

    def forget(self, row: int) -> None:
        """Empty a row outside any plan (after warm-up)."""
        self._table.release(row)

    def _needs(self, plan: StepPlan) -> SamplingShape:
        return SamplingShape.FULL if self._scorer.has_work(plan) else self._sampling.shape(plan.rows[plan.samples])

    def _run(
        self, stage: Stage, plan: StepPlan, needs: SamplingShape, carried: tuple[torch.Tensor, ...]
    ) -> tuple[HostBatch, StepOutputs]:
        """One stage's step; `carried` lies on the host."""
        bucket = stage.bucket(plan.num_tokens, len(plan.rows), int(plan.query_lengths.max(initial=1)), needs)
        batch = build_host_batch(plan, self._page_tokens, bucket, self._table_width)
        received = stage.receive(carried, bucket, plan.num_tokens) if carried else ()
        return batch, stage.run(bucket, self._inputs(stage, plan, batch, bucket, received))

    def _blank(self, stage: Stage, plan: StepPlan, bucket: Bucket) -> StepInputs:
        """Inputs of a bucket for the one token of `plan`."""
        batch = build_host_batch(plan, self._page_tokens, bucket, self._table_width)
        return self._inputs(stage, plan, batch, bucket, stage.blank(bucket.tokens))

    def _inputs(
        self, stage: Stage, plan: StepPlan, batch: HostBatch, bucket: Bucket, received: tuple[torch.Tensor, ...]
    ) -> StepInputs:
        put = stage.device.to_device
        positions = put(torch.from_numpy(batch.positions))
        index, sampling, hidden_index = batch.logits_index[:0], stage.no_draws, None
        if stage is self._last:
            whole = bucket.tokens if bucket.sampling is SamplingShape.FULL else None
            index, sampling = batch.logits_index, self._sampling.build(*_drawn(plan, batch), bucket.sampling)
            hidden_index = self._scorer.hidden_index(plan, batch.attention.query_start, whole)
        return StepInputs(
            token_ids=self._token_ids(stage, batch, positions),
            positions=positions,
            plans=stage.plans(batch.attention),
            logits_index=put(torch.from_numpy(index)),
            sampling=sampling,
            hidden_index=None if hidden_index is None else put(torch.from_numpy(hidden_index)),
            carried=received,
        )

    def _token_ids(self, stage: Stage, batch: HostBatch, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T] on the stage's device, out of the token table on the last one's."""
        rows = torch.from_numpy(batch.rows)
        if stage.device is self._device:
            return self._table.tokens[stage.device.to_device(rows), positions].long()
        there = self._device.to_device
        ids = self._table.tokens[there(rows), there(torch.from_numpy(batch.positions))].long()
        return stage.device.to_device(self._device.to_host(ids))

    def _keep_draws(self, plan: StepPlan, batch: HostBatch, outputs: StepOutputs) -> None:
        """Write what was drawn into the token table, on the device; draws of padding go to the dump column."""
        if not batch.num_sampled:
            return
        rows, places = _drawn(plan, batch)
        if batch.num_sampled < len(places):
            places = np.where(np.arange(len(places)) < batch.num_sampled, places, self._table.max_len)
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


def _drawn(plan: StepPlan, batch: HostBatch) -> tuple[Int64s, Int64s]:
    """int64 [R] each: the table row of each draw, and the place in its sequence that the drawn token takes."""
    rows = plan.rows[batch.sampled].astype(np.int64)
    return rows, (plan.computed + plan.query_lengths)[batch.sampled].astype(np.int64)
