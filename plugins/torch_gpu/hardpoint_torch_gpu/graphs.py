"""Steps captured as graphs: a decode step is recorded once per size and replayed on the same buffers.

A replay costs the host one call instead of hundreds. Steps that hold prompts are long enough to be called op by op, and
so are those that want penalties, masks or log-probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

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
from hardpoint_torch_gpu.compiles import LateCompiles
from hardpoint_torch_gpu.leaves import constants, leaves, mapped


def decode_sizes(most: int) -> Iterator[int]:
    """Numbers of requests with a graph: close together where a padded row costs much of the step."""
    size = 1
    while size < most:
        yield size
        size += 1 if size < 4 else 4 if size < 32 else 8 if size < 64 else 16 if size < 256 else 32
    yield most


class GraphBuilder(ProgramBuilder):
    """Graphs for decode steps, the step itself for all others. The graphs share one memory pool."""

    def __init__(self, device: torch.device, shapes: tuple[SamplingShape, ...], most: int, late: LateCompiles) -> None:
        """shapes: of sampling inputs that the device's kernels take in a graph; most: requests of the largest one.

        late: watches for compiles from `seal` on.
        """
        self._device = device
        self._shapes = shapes
        self._most = most
        self._pool: Any = None
        self._late = late
        self._sealed = False
        self.captured: Counter[SamplingShape] = Counter()
        #: Why steps cannot be recorded; then all are called op by op.
        self.refusal = ""

    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        most = min(self._most, max_requests, max_tokens)
        decodes = (Bucket(n, n, 1, shape) for n in decode_sizes(most) for shape in self._shapes)
        return (*decodes, ANY_SIZE)

    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        if self._sealed:
            raise UnsupportedOperation(f"a program for {bucket} is asked for after serving has begun")
        return EagerBuilder().build(step, bucket) if bucket == ANY_SIZE else GraphProgram(self, step, bucket)

    def seal(self) -> None:
        self._sealed = True
        self._late.watch()

    def capture(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> torch.cuda.graph:
        """The context in which a graph is recorded, in the pool of all."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return torch.cuda.graph(graph, pool=self._pool, stream=stream)


class GraphProgram(Program):
    """One graph. It belongs to the weights and the state that it was recorded with."""

    def __init__(self, builder: GraphBuilder, step: StepFunction, bucket: Bucket) -> None:
        self._builder = builder
        self._step = step
        self._bucket = bucket
        self._graph: torch.cuda.CUDAGraph | None = None
        self._by_dtype: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}

    def prepare(self, inputs: StepInputs, state: State, weights: Weights) -> State:
        if self._builder.refusal:
            return state
        self._static = mapped(inputs, torch.clone)
        self._constants = constants(inputs)
        self._state, self._weights = state, weights
        for place, tensor in enumerate(leaves(self._static)):
            places, targets = self._by_dtype.setdefault(tensor.dtype, ([], []))
            places.append(place)
            targets.append(tensor)
        try:
            self._record(state, weights)
        except RuntimeError as error:
            # An op that asks the device something, or that copies from plain host memory: no step can hold it.
            torch.cuda.synchronize()
            self._builder.refusal = str(error).partition("\n")[0]
        else:
            self._builder.captured[self._bucket.sampling] += 1
        return state

    def _record(self, state: State, weights: Weights) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                self._step(self._static, state, weights)  # whatever is compiled or set up at first use
            graph = torch.cuda.CUDAGraph()
            with self._builder.capture(graph, stream):
                self._outputs, _ = self._step(self._static, state, weights)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = graph

    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        if self._graph is None and not self._builder.refusal:
            self.prepare(inputs, state, weights)
        if self._graph is None:
            with torch.inference_mode():
                return self._step(inputs, state, weights)
        if state is not self._state or weights is not self._weights:
            raise UnsupportedOperation("a graph runs with the state and the weights that it was recorded with")
        fresh = leaves(inputs)
        for places, targets in self._by_dtype.values():
            torch._foreach_copy_(targets, [fresh[place] for place in places], non_blocking=True)
        self._graph.replay()
        return mapped(self._outputs, torch.clone), state

    def describe(self) -> str:
        count = sum(self._builder.captured.values())
        if self._builder.refusal:
            return f"steps op by op, as one cannot be recorded: {self._builder.refusal}"
        return f"{count} graphs of up to {self._builder._most} decodes, prompts op by op" if count else ""
