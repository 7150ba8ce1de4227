"""Steps captured as graphs: a decode step is recorded once per size and replayed on the same buffers.

A replay costs the host one call instead of hundreds. Small steps with prompts are recorded in pieces, with attention
between them. Steps with more tokens are long enough to be called op by op, and so are those that want penalties, masks
or log-probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

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
from hardpoint_torch_gpu.compile_ahead import CompileAhead
from hardpoint_torch_gpu.compiles import LateCompiles
from hardpoint_torch_gpu.recording import RecordedStep, Recorder

#: Tokens of the steps with prompts that are recorded in pieces, and requests of the largest of them.
MIXED_TOKENS, MIXED_REQUESTS = (32, 64, 128, 256, 384, 512), 256
#: Kinds of recorded steps, as people are told of them.
_DECODE, _MIXED = "decode", "mixed"


def decode_sizes(most: int) -> Iterator[int]:
    """Numbers of requests with a graph: close together where a padded row costs much of the step."""
    size = 1
    while size < most:
        yield size
        size += 1 if size < 4 else 4 if size < 32 else 8 if size < 64 else 16 if size < 256 else 32
    yield most


class GraphBuilder(ProgramBuilder):
    """Graphs for decode steps, pieces for small mixed ones, the step itself for all others."""

    def __init__(self, device: torch.device, shapes: tuple[SamplingShape, ...], most: int, late: LateCompiles) -> None:
        """shapes: of sampling inputs that the device's kernels take in a graph; most: requests of the largest one.

        late: watches for compiles from `seal` on.
        """
        self._shapes = shapes
        self._most = most
        self._late = late
        self._sealed = False
        self.recorder = Recorder(device)
        self.ahead = CompileAhead(device)
        self.captured: Counter[str] = Counter()
        self.largest = 0
        #: Why steps of a kind cannot be recorded; then all are called op by op.
        self.refusals: dict[str, str] = {}

    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        most = min(self._most, max_requests, max_tokens)
        decodes = (Bucket(n, n, 1, shape) for n in decode_sizes(most) for shape in self._shapes)
        mixed = (
            Bucket(n, min(n, max_requests, MIXED_REQUESTS), 0, shape)
            for n in MIXED_TOKENS
            for shape in self._shapes
            if n <= max_tokens
        )
        return (*decodes, *mixed, ANY_SIZE)

    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        if self._sealed:
            raise UnsupportedOperation(f"a program for {bucket} is asked for after serving has begun")
        if bucket == ANY_SIZE:
            return EagerBuilder().build(step, bucket)
        return GraphProgram(self, step, bucket)

    def seal(self) -> None:
        self._sealed = True
        self._late.watch()

    def noted(self, kind: str, bucket: Bucket) -> None:
        """A step was recorded."""
        self.captured[kind] += 1
        if kind == _MIXED:
            self.largest = max(self.largest, bucket.tokens)

    def describe(self) -> str:
        """What was recorded, and what could not be."""
        if all(kind in self.refusals for kind in (_DECODE, _MIXED)):
            return f"steps op by op, as one cannot be recorded: {self.refusals[_DECODE]}"
        said = [f"{self.captured[_DECODE]} graphs of up to {self._most} decodes"] if self.captured[_DECODE] else []
        if pieces := self.captured[_MIXED]:
            said.append(f"{pieces} in pieces for mixed steps of up to {self.largest} tokens")
        said += [f"{kind} steps op by op: {why}" for kind, why in self.refusals.items()]
        return ", ".join([*said, "longer prompts op by op"]) if said else ""


class GraphProgram(Program):
    """A step that is recorded when it is prepared, or else called op by op."""

    def __init__(self, builder: GraphBuilder, step: StepFunction, bucket: Bucket) -> None:
        self._builder, self._step, self._bucket = builder, step, bucket
        self._kind = _DECODE if bucket.query == 1 else _MIXED
        self._recorded: RecordedStep | None = None

    def begin(self, inputs: StepInputs, state: State, weights: Weights) -> None:
        likeness = (self._kind, self._bucket.sampling, (self._bucket.tokens - 1).bit_length())
        with torch.inference_mode():
            self._builder.ahead.begin(likeness, lambda: self._step(inputs, state, weights))

    def prepare(self, inputs: StepInputs, state: State, weights: Weights) -> State:
        builder = self._builder
        builder.ahead.finish()
        if self._kind in builder.refusals:
            return state
        recorded = RecordedStep(builder.recorder, inputs, state, weights, pieces=self._kind == _MIXED)
        with torch.inference_mode(), builder.recorder.aside():
            self._step(inputs, state, weights)  # whatever is compiled or set up at first use
            try:
                recorded.record(self._step, state, weights)
            except (RuntimeError, AttributeError) as error:
                builder.recorder.recover()
                builder.refusals[self._kind] = str(error).partition("\n")[0]
                return state
        self._recorded = recorded
        builder.noted(self._kind, self._bucket)
        return state

    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        with torch.inference_mode():
            if self._recorded is None:
                return self._step(inputs, state, weights)
            return self._recorded.replay(inputs, state, weights), state

    def describe(self) -> str:
        return self._builder.describe()
