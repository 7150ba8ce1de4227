"""Steps captured as graphs: a decode step is recorded once per size and replayed on the same buffers.

A replay costs the host one call instead of hundreds. Small steps with prompts are recorded in pieces, with attention
between them. Steps with more tokens are long enough to be called op by op, and so are those that want penalties, masks
or log-probabilities. Most sizes are recorded while serving (`backlog.py`); their kernels are compiled before, as are
those of steps that are called op by op (`rehearsal.py`).

Decode steps whose rows share pages (`sharing.py`) have graphs of their own, in which a tile of rows reads these pages
once. One is recorded when a step of its size shares pages and recording has its share of the time; until then the
graph in which every row reads for itself serves.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterator

import torch

from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.program import (
    ANY_SIZE,
    Bucket,
    EagerBuilder,
    Program,
    ProgramBuilder,
    SamplingShape,
    StepFunction,
    StepInputs,
    StepOutputs,
    Weights,
)
from hardpoint_platforms.state_cache import State
from hardpoint_torch_gpu.backlog import WANTED, Backlog, LateBucket, halving
from hardpoint_torch_gpu.compile_ahead import CompileAhead
from hardpoint_torch_gpu.compiles import LateCompiles
from hardpoint_torch_gpu.recording import RecordedStep, Recorder
from hardpoint_torch_gpu.rehearsal import Rehearsal, RehearsalBucket, rehearsals
from hardpoint_torch_gpu.shared_steps import alone, rehearsed, saved, shares

log = logging.getLogger(__name__)

#: Tokens of the steps with prompts that are recorded in pieces, and requests of the largest of them.
MIXED_TOKENS, MIXED_REQUESTS = (32, 64, 128, 256, 384, 512), 256
#: Kinds of recorded steps, as people are told of them.
_DECODE, _MIXED, _SHARED = "decode", "mixed", "shared"


def decode_sizes(most: int) -> Iterator[int]:
    """Numbers of requests with a graph: close together where a padded row costs much of the step."""
    size = 1
    while size < most:
        yield size
        size += 1 if size < 4 else 4 if size < 32 else 8 if size < 64 else 16 if size < 256 else 32
    yield most


class GraphBuilder(ProgramBuilder):
    """Graphs for decode steps, pieces for small mixed ones, the step itself for all others."""

    def __init__(
        self,
        device: torch.device,
        shapes: tuple[SamplingShape, ...],
        most: int,
        late: LateCompiles,
        *,
        put_off: bool = False,
    ) -> None:
        """shapes: of sampling inputs that the device's kernels take in a graph; most: requests of the largest one.

        late: watches for compiles from `seal` on. put_off: only the most needed sizes are recorded before serving.
        """
        self._shapes = shapes
        self._most = most
        self._late = late
        self._puts_off = put_off
        self._sealed = False
        self._order: list[Bucket] = []
        self._rehearsed: set[Hashable] = set()
        #: Blank decode steps with shared pages: what is launched does not depend on their size, so those of one size.
        self.blanks: tuple[StepInputs, ...] | None = None
        self._programs: dict[Bucket, GraphProgram] = {}
        self.recorder = Recorder(device)
        self.ahead = CompileAhead(device)
        #: Sizes that are recorded while serving.
        self.backlog = Backlog()
        self.captured: Counter[str] = Counter()
        self.largest = 0
        #: Why steps of a kind cannot be recorded; then all are called op by op, or read shared pages for each row.
        self.refusals: dict[str, str] = {}

    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        most = min(self._most, max_requests, max_tokens)
        decodes, mixed = list(decode_sizes(most)), [n for n in MIXED_TOKENS if n <= max_tokens]
        first = {(decodes[0], 1), (decodes[-1], 1), *((n, 0) for n in mixed[-1:])}

        def of(tokens: int, requests: int, query: int) -> Iterator[Bucket]:
            for shape in self._shapes:
                if self._puts_off and (tokens, query) not in first:
                    yield LateBucket(tokens, requests, query, shape, self.backlog)
                else:
                    yield Bucket(tokens, requests, query, shape)

        sized = [
            *(bucket for n in decodes for bucket in of(n, n, 1)),
            *(bucket for n in mixed for bucket in of(n, min(n, max_requests, MIXED_REQUESTS), 0)),
        ]
        ranks = {(n, 1): rank for rank, n in enumerate(halving(decodes))}
        ranks |= {(n, 0): len(decodes) + rank for rank, n in enumerate(reversed(mixed))}
        self._order = sorted(sized, key=lambda bucket: ranks.get((bucket.tokens, bucket.query), 0))
        return (*sized, *rehearsals(max_tokens, max_requests, max((most, *mixed))), ANY_SIZE)

    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        if self._sealed:
            raise UnsupportedOperation(f"a program for {bucket} is asked for after serving has begun")
        if bucket == ANY_SIZE:
            return EagerBuilder().build(step, bucket)
        if isinstance(bucket, RehearsalBucket):
            return Rehearsal(step, bucket, self.ahead)
        program = self._programs[bucket] = GraphProgram(self, step, bucket)
        return program

    def seal(self) -> None:
        self._sealed = True
        self.backlog.drop([one.call_op_by_op() for one in self._programs.values() if one.kind in self.refusals])
        self.backlog.in_order(self._order)
        self._late.watch()

    def waits(self, bucket: Bucket) -> bool:
        """Put a program off, if it is one of those that may be: not one that this builder offered as needed first."""
        mine = isinstance(bucket, LateBucket) and bucket.backlog is self.backlog
        if mine:
            self.backlog.add(bucket)
        return mine

    def unrehearsed(self, bucket: Bucket) -> bool:
        """Whether kernels of such a step may be missing: its size has not run yet, or none like it with such draws, or
        some kernel was not on disk.

        Triton compiles anew for numbers that are 1 or multiples of 16, and the kernels have other tiles for more rows.
        """
        size, divisor = (bucket.tokens, bucket.query), min(bucket.tokens & -bucket.tokens, 16)
        likeness = (bucket.query, bucket.sampling, (bucket.tokens - 1).bit_length(), divisor)
        new = not {size, likeness} <= self._rehearsed
        self._rehearsed |= {size, likeness}
        return new or self.ahead.missing > 0

    def catch_up(self) -> bool:
        if self._sealed and (bucket := self.backlog.next()) is not None:
            self._record_late(bucket)
        return bool(self.backlog)

    def before_step(self, prompts: bool) -> None:
        """Record a size that waits, where it is time. `prompts`: whether the step brings prompts."""
        if self._sealed and (bucket := self.backlog.turn(prompts)) is not None:
            self._record_late(bucket)

    def _record_late(self, bucket: Bucket) -> None:
        started, program = time.monotonic(), self._programs[bucket]
        why = program.record_late()
        seconds = time.monotonic() - started
        if why:
            log.warning("%s steps of other sizes are not recorded, larger ones serve: %s", program.kind, why)
            waiting = [one for one in self._programs.values() if one.kind == program.kind and one.waits]
            self.backlog.give_up([bucket, *(one.call_op_by_op() for one in waiting)], seconds)
        else:
            self.backlog.done(bucket, seconds)
        if not self.backlog:
            done = self.backlog
            log.info(
                "no size waits any more: %d recorded while serving in %.1f s, the longest in %.0f ms",
                done.recorded, done.seconds, done.longest * 1e3,
            )  # fmt: skip

    def noted(self, kind: str, bucket: Bucket) -> None:
        """A step was recorded."""
        self.captured[kind] += 1
        if kind == _MIXED:
            self.largest = max(self.largest, bucket.tokens)

    def describe(self) -> str:
        """What was recorded, what will be while serving, and what could not be."""
        if all(kind in self.refusals for kind in (_DECODE, _MIXED)):
            return f"steps op by op, as one cannot be recorded: {self.refusals[_DECODE]}"
        said = [f"{self._count(_DECODE)} graphs of up to {self._most} decodes"] if self.captured[_DECODE] else []
        if self.captured[_MIXED]:
            said.append(f"{self._count(_MIXED)} in pieces for mixed steps of up to {self.largest} tokens")
        if said and self.backlog:
            said.append("the others recorded while serving")
        if self.captured[_SHARED]:
            said.append(f"{self.captured[_SHARED]} for decodes that share pages")
        said += [f"{kind} steps op by op: {why}" for kind, why in self.refusals.items() if kind != _SHARED]
        return ", ".join([*said, "longer prompts op by op"]) if said else ""

    def _count(self, kind: str) -> str:
        recorded = self.captured[kind]
        waiting = sum(one.kind == kind and one.waits for one in self._programs.values())
        return f"{recorded} of {recorded + waiting}" if waiting else str(recorded)


class GraphProgram(Program):
    """A step that is recorded when it is prepared, or put off until its size is wanted, or else called op by op."""

    def __init__(self, builder: GraphBuilder, step: StepFunction, bucket: Bucket) -> None:
        self._builder, self._step, self._bucket = builder, step, bucket
        self.kind = _DECODE if bucket.query == 1 else _MIXED
        self._recorded: RecordedStep | None = None
        self._put_off: tuple[RecordedStep, StepInputs, State, Weights] | None = None
        self._shared: RecordedStep | None = None

    @property
    def waits(self) -> bool:
        """Whether it will be recorded while serving."""
        return self._put_off is not None

    def begin(self, inputs: StepInputs, state: State, weights: Weights) -> None:
        tokens = self._bucket.tokens
        fills = tokens & (tokens - 1) == 0  # a tile of products of few rows, which then masks none
        likeness = (self.kind, self._bucket.sampling, (tokens - 1).bit_length(), fills)
        with torch.inference_mode():
            self._builder.ahead.begin(likeness, lambda: self._step(inputs, state, weights))
            for number, each in enumerate(rehearsed(inputs) if self.kind == _DECODE else ()):
                self._builder.ahead.begin((_SHARED, number), lambda each=each: self._step(each, state, weights))  # type: ignore[misc]

    def prepare(self, inputs: StepInputs, state: State, weights: Weights) -> State:
        builder = self._builder
        builder.ahead.finish()
        refused = self.kind in builder.refusals
        late, fresh = not refused and builder.waits(self._bucket), builder.unrehearsed(self._bucket)
        if fresh or not (late or refused):
            with torch.inference_mode(), builder.recorder.aside(), builder.ahead.listening():
                self._step(inputs, state, weights)  # whatever is compiled or set up at first use
        if self.kind == _DECODE and builder.blanks is None:
            builder.blanks = tuple(rehearsed(inputs))
            for each in builder.blanks:
                with torch.inference_mode(), builder.recorder.aside(), builder.ahead.listening():
                    self._step(each, state, weights)
        if refused:
            return state
        recorded = RecordedStep.of(builder.recorder, inputs, state, weights, pieces=self.kind == _MIXED)
        if late:
            self._put_off = recorded, inputs, state, weights
        elif why := self._record(recorded, state, weights):
            builder.refusals[self.kind] = why
        else:
            self._recorded = recorded
        return state

    def call_op_by_op(self) -> Bucket:
        """Never record it. Returns its bucket."""
        self._put_off = None
        return self._bucket

    def record_late(self) -> str:
        """Record what was put off. Returns why that cannot be done, or ""."""
        assert self._put_off is not None, "only what was put off is in the backlog"
        recorded, inputs, state, weights = self._put_off
        self._put_off = None
        try:
            with torch.inference_mode(), self._builder.recorder.aside():
                self._step(inputs, state, weights)  # this thread may have to set up what the other one has
        except RuntimeError as error:  # memory that others took meanwhile
            return _first_line(error)
        if why := self._record(recorded, state, weights):
            return why
        self._recorded = recorded
        return ""

    def _record(self, recorded: RecordedStep, state: State, weights: Weights, kind: str = "") -> str:
        """`kind`: another than the program has. Returns why it cannot be recorded, or ""."""
        builder = self._builder
        with torch.inference_mode(), builder.recorder.aside():
            try:
                recorded.record(self._step, state, weights)
            except (RuntimeError, AttributeError) as error:
                builder.recorder.recover()
                return _first_line(error)
        builder.noted(kind or self.kind, self._bucket)
        return ""

    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        self._builder.before_step(prompts=self.kind == _MIXED)
        with torch.inference_mode():
            if self._recorded is None:
                return self._step(inputs, state, weights)
            if self.kind == _DECODE and shares(inputs):
                return self._run_shared(self._recorded, inputs, state, weights)
            return self._recorded.replay(inputs, state, weights), state

    def _run_shared(
        self, recorded: RecordedStep, inputs: StepInputs, state: State, weights: Weights
    ) -> tuple[StepOutputs, State]:
        """A step whose rows share pages; `recorded`: the step in which every row reads for itself."""
        builder = self._builder
        if self._shared is None and _SHARED not in builder.refusals and builder.backlog.rested(WANTED):
            self._record_shared(recorded, inputs, state, weights)
        if self._shared is None:
            return recorded.replay(alone(inputs), state, weights), state
        return self._shared.replay(inputs, state, weights), state

    def _record_shared(self, recorded: RecordedStep, inputs: StepInputs, state: State, weights: Weights) -> None:
        """Record steps like this one; nothing of it runs."""
        builder, started = self._builder, time.monotonic()
        try:
            shared = recorded.beside(inputs)
            with builder.recorder.aside():
                for each in builder.blanks or ():
                    self._step(each, state, weights)  # this thread may have to set up what the other one has
            why = self._record(shared, state, weights, _SHARED)
        except RuntimeError as error:  # memory that others took meanwhile
            why = _first_line(error)
        if why:
            builder.refusals[_SHARED] = why
            log.warning("decodes that share pages are not recorded, each row reads them for itself: %s", why)
            builder.backlog.give_up((), time.monotonic() - started)
            return
        self._shared = shared
        builder.backlog.done(self._bucket, time.monotonic() - started)
        log.info(
            "recorded steps of %d decodes that share pages: a layer of this one reads %d cached tokens less",
            self._bucket.requests, saved(inputs),
        )  # fmt: skip

    def describe(self) -> str:
        return self._builder.describe()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
