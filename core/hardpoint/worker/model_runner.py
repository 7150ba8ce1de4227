"""The model runner: a plan goes in, a step runs on the device, a result comes out.

    launch(plan)      rows enter and leave, batch is laid out, programs run, drawn ids go into the token table
    collect(flight)   waits for the step and brings ids and log-probabilities to the host

Nothing between the two waits for the device, so that the next plan may be launched before the last is collected. A
model that is cut over several devices waits where one hands its activations to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import NewSequence, RowLogprobs, StepPlan, StepResult
from hardpoint.worker.batch_builder import HostBatch, build_host_batch
from hardpoint.worker.prompt_scores import PromptScorer, PromptScores, parts_of, row_logprobs
from hardpoint.worker.sampling_batch import SamplingBatchBuilder
from hardpoint.worker.sequence_table import SequenceTable
from hardpoint.worker.stage import Stage, StageParts
from hardpoint_platforms.ops.contract import Kernel
from hardpoint_platforms.program import Bucket, Footprint, SamplingShape, StepInputs, StepOutputs
from hardpoint_platforms.streams import Readback


@dataclass(frozen=True)
class RunnerParts:
    """What a runner is made of; see `hardpoint.worker.worker`, which makes it.

    Attributes:
        stages: in the order of the layers; the last one draws.
        score: the bound `logprobs` op of the last stage.
        max_num_seqs: rows; max_model_len: tokens of a row; max_batch_tokens: of a step.
        progress: called with (phase, share done) as programs are built and made ready and warm-up steps run.
    """

    stages: tuple[StageParts, ...]
    score: Kernel
    max_num_seqs: int
    max_model_len: int
    max_batch_tokens: int
    progress: Callable[[str, float], None] | None = None


@dataclass(frozen=True, eq=False)
class Flight:
    """A launched step whose results are still on the device. Holds all that collecting needs: the rows may change hands
    before.

    Attributes:
        sampled: places in the plan that draw; logprobs_wanted: top log-probabilities each asked, -1 for none.
        results: the drawn ids, which rows were finite, and log-probabilities, if any; rows of padding among them.
        prompt_scores: by place in the plan.
    """

    plan: StepPlan
    sampled: npt.NDArray[np.int64]
    logprobs_wanted: tuple[int, ...]
    results: Readback
    prompt_scores: dict[int, PromptScores]
    started: float


class ModelRunner:
    """Owns the stages and the token table, which lies on the last stage's device. Used by one thread at a time."""

    def __init__(self, parts: RunnerParts) -> None:
        self._progress = parts.progress or _silent
        self._stages = tuple(
            Stage(stage, parts.max_batch_tokens, parts.max_num_seqs, stage is parts.stages[-1], self._progress)
            for stage in parts.stages
        )
        self._last = last = self._stages[-1]
        self._device = last.device
        self._page_tokens = parts.stages[-1].layout.page_tokens
        self._warm_up_length = min(8, parts.max_model_len - 1)
        #: Whether a decode and a prompt may share a step here.
        self._mixes = (
            all(stage.device.capabilities().limits.mixed for stage in parts.stages)
            and parts.max_num_seqs > 1
            and parts.max_batch_tokens > self._warm_up_length
        )
        self._table = SequenceTable(last.device, parts.max_num_seqs, parts.max_model_len, last.model.vocab_size)
        self._sampling = SamplingBatchBuilder(last.device, self._table)
        self._scorer = PromptScorer(last.device, last.model, parts.score, last.weights, self._table)
        self._table_width = -(-parts.max_model_len // self._page_tokens)

    def warm_up(self, groups: int) -> None:
        """Make all programs ready, then run a step of each kind in page 0: what cannot run fails now, and what compiles
        at first use does so now.

        groups: cache groups of the layout.
        """
        length, sequence, step = self._warm_up_length, self._blank_sequence, partial(self._blank_plan, groups)
        self._table.rehearse()
        first = step(-4, (1, 0))
        self._table.enter(sequence(0))
        with torch.inference_mode():
            for stage in self._stages:
                stage.prepare(lambda bucket, stage=stage: self._blank(stage, first, bucket), self._progress)  # type: ignore[misc]
        self.forget(0)
        self._progress("warm-up", 0.0)
        self.execute(step(-3, (length, 0), new=(sequence(0),)))
        self._progress("warm-up", 0.4)
        self.execute(step(-2, (1, length)))
        if self._mixes:
            self._progress("warm-up", 0.7)
            self.execute(step(-1, (1, length), (length, 0), new=(sequence(1),)))
            self.forget(1)
        self.forget(0)
        for stage in self._stages:
            stage.seal()

    def footprints(
        self, groups: int, choose: Callable[[Sequence[Bucket]], Sequence[Bucket]]
    ) -> Iterator[tuple[Bucket, Footprint | None]]:
        """What the last stage's programs of the buckets chosen take: each is compiled, none runs."""
        first = self._blank_plan(groups, -1, (1, 0))
        self._table.enter(self._blank_sequence(0))
        with torch.inference_mode():
            for bucket in choose(self._last.buckets):
                yield bucket, self._last.footprint(bucket, self._blank(self._last, first, bucket))

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
            scores = self._scorer.launch(plan, outputs.hidden)
            results = self._device.read_back(_results(outputs))
        sampled = batch.sampled[: batch.num_sampled]
        wanted = self._table.logprobs[plan.rows[sampled]]
        return Flight(plan, sampled, tuple(wanted.tolist()), results, scores, started)

    def catch_up(self) -> bool:
        """While no request is served: do a piece of what the devices put off; whether any is left."""
        return any(stage.catch_up() for stage in self._stages)

    def collect(self, flight: Flight) -> StepResult:
        """Wait for a launched step's results, and for nothing that was launched after it."""
        tokens = np.full(len(flight.plan.rows), -1, np.int64)
        count = len(flight.sampled)
        ids, finite, *logprobs = (tensor.numpy()[:count] for tensor in flight.results.wait())
        tokens[flight.sampled] = ids
        return StepResult(
            step=flight.plan.step,
            tokens=tokens,
            logprobs=_logprobs(flight, ids, logprobs) if logprobs else {},
            prompt_logprobs=self._scorer.collect(flight.prompt_scores),
            bad_rows=tuple(flight.sampled[~finite].tolist()),
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

    def _blank_sequence(self, row: int) -> NewSequence:
        length = self._warm_up_length
        return NewSequence(row, f"warm-up {row}", np.zeros(length, np.int32), length, SamplingParams(temperature=0.0))

    def _blank_plan(
        self, groups: int, number: int, *rows: tuple[int, int], new: tuple[NewSequence, ...] = ()
    ) -> StepPlan:
        """A step in page 0. rows: (new tokens, computed ones) of each."""
        table = np.zeros((len(rows), self._warm_up_length // self._page_tokens + 1), np.int32)
        return StepPlan(
            step=number,
            released=(),
            new=new,
            rows=np.arange(len(rows), dtype=np.int32),
            query_lengths=np.array([query for query, _ in rows], np.int32),
            computed=np.array([computed for _, computed in rows], np.int32),
            samples=np.ones(len(rows), np.bool_),
            page_tables=(table,) * groups,
        )

    def _needs(self, plan: StepPlan) -> SamplingShape:
        if not self._last.shaped:
            return SamplingShape.ANY
        return SamplingShape.FULL if self._scorer.has_work(plan) else self._sampling.shape(plan.rows[plan.samples])

    def _run(
        self, stage: Stage, plan: StepPlan, needs: SamplingShape, carried: tuple[torch.Tensor, ...]
    ) -> tuple[HostBatch, StepOutputs]:
        """One stage's step; `carried` lies on the host. What the last one draws goes into the token table."""
        bucket = stage.bucket(plan.num_tokens, len(plan.rows), int(plan.query_lengths.max(initial=1)), needs)
        batch = build_host_batch(plan, self._page_tokens, bucket, self._table_width)
        received = stage.receive(carried, bucket, plan.num_tokens) if carried else ()
        if stage is not self._last:
            return batch, stage.run(bucket, self._inner_inputs(stage, batch, received))
        inputs, drawn_into = self._inputs(plan, batch, bucket, received)
        outputs = stage.run(bucket, inputs)
        if batch.num_sampled:
            self._table.store(drawn_into, outputs.sample.token_ids)
        return batch, outputs

    def _blank(self, stage: Stage, plan: StepPlan, bucket: Bucket) -> StepInputs:
        """Inputs of a bucket for the one token of `plan`."""
        batch, blank = build_host_batch(plan, self._page_tokens, bucket, self._table_width), stage.blank(bucket.tokens)
        if stage is not self._last:
            return self._inner_inputs(stage, batch, blank)
        inputs, drawn_into = self._inputs(plan, batch, bucket, blank)
        if self._table.static:
            # what runs beside the program has these shapes, too
            self._table.store(drawn_into, inputs.logits_index)
            if bucket.sampling is SamplingShape.FULL:
                self._scorer.rehearse(bucket.tokens, stage.dtype)
        return inputs

    def _inner_inputs(self, stage: Stage, batch: HostBatch, received: tuple[torch.Tensor, ...]) -> StepInputs:
        """Of a stage that draws nothing. Token ids come out of the table on the last stage's device."""
        host = [torch.from_numpy(array) for array in (batch.rows, batch.positions)]
        there = self._device.upload(host)
        ids = self._device.to_host(self._table.read(*there))
        ids, positions, index = stage.device.upload((ids, host[1], torch.zeros(0, dtype=torch.int64)))
        return StepInputs(ids, positions, stage.plans(batch.attention), index, stage.no_draws, carried=received)

    def _inputs(
        self, plan: StepPlan, batch: HostBatch, bucket: Bucket, received: tuple[torch.Tensor, ...]
    ) -> tuple[StepInputs, tuple[torch.Tensor, torch.Tensor]]:
        """Of the last stage, and where in the token table its draws go; those of padding go to the dump column."""
        drawn = plan.rows[batch.sampled].astype(np.int64)
        at = (plan.computed + plan.query_lengths)[batch.sampled].astype(np.int64)
        at[batch.num_sampled :] = self._table.max_len
        whole = bucket.tokens if bucket.sampling is SamplingShape.FULL else None
        scored = self._scorer.hidden_index(plan, batch.attention.query_start, whole)
        arrays = [batch.rows, batch.positions, batch.logits_index, drawn, at, *([] if scored is None else [scored])]
        rows, positions, index, drawn_rows, drawn_at, *hidden = self._device.upload(
            [torch.from_numpy(array) for array in arrays]
        )
        inputs = StepInputs(
            token_ids=self._table.read(rows, positions),
            positions=positions,
            plans=self._last.plans(batch.attention),
            logits_index=index,
            sampling=self._sampling.build(drawn, at, drawn_at, bucket.sampling),
            hidden_index=hidden[0] if hidden else None,
            carried=received,
        )
        return inputs, (drawn_rows, drawn_at)


def _silent(phase: str, done: float) -> None:
    """Tells nobody."""


def _results(outputs: StepOutputs) -> list[torch.Tensor]:
    """What the host wants of a step, whole: parts of it would have shapes of their own."""
    sample = outputs.sample
    scores = () if sample.logprobs is None else parts_of(sample.token_ids, sample.logprobs)[1:]
    return [sample.token_ids, outputs.finite, *scores]


def _logprobs(flight: Flight, ids: npt.NDArray[np.int64], scores: Sequence[npt.NDArray[Any]]) -> dict[int, RowLogprobs]:
    return {
        place: row_logprobs([part[i : i + 1] for part in (ids, *scores)], wanted)
        for i, (place, wanted) in enumerate(zip(flight.sampled.tolist(), flight.logprobs_wanted, strict=True))
        if wanted >= 0
    }
