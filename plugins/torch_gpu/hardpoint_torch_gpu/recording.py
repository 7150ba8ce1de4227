"""A step recorded as graphs: one where its plans have fixed shapes, else pieces with the ops that read a plan between.

A replay costs the host one call instead of hundreds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Self

import torch

from hardpoint_platforms.program import StepFunction, StepInputs, StepOutputs, Weights
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.trees import mapped
from hardpoint_torch_gpu.seams import Seam
from hardpoint_torch_gpu.static_inputs import StaticInputs

#: call(plan), with the plan of one planner.
Call = Callable[[Any], None]


class Graph(ABC):
    """Launches between `begin` and `end` are recorded, not made; `replay` makes them all at once."""

    @abstractmethod
    def begin(self) -> None:
        """Start, on the current stream."""

    @abstractmethod
    def end(self) -> None:
        """Stop."""

    @abstractmethod
    def replay(self) -> None:
        """On the current stream, with the addresses that were recorded."""


class Recorder:
    """Makes graphs that share one memory pool: they never run side by side, and what one returns is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On a stream of its own, behind the current one: the default stream cannot be recorded."""
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def graph(self) -> Graph:
        """A graph to record, within `aside`."""
        return _GpuGraph(self._pool)

    def recover(self) -> None:
        """After a recording that failed."""
        torch.cuda.synchronize(self._device)


class _GpuGraph(Graph):
    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def begin(self) -> None:
        # What other threads ask the driver meanwhile does not end the recording.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class RecordedStep:
    """A step as it was recorded. It belongs to its state and its weights."""

    def __init__(self, recorder: Recorder, static: StaticInputs, plans: int, *, pieces: bool) -> None:
        """`plans`: how many the step has. `pieces`: cut where a plan is read; each run brings its own plans."""
        self._recorder = recorder
        self._in_pieces = pieces
        self._plans = plans
        self.static = static
        #: (graph, call after it, number of the plan that the call takes); the last graph has no call.
        self._pieces: list[tuple[Graph, Call | None, int]] = []

    @classmethod
    def of(cls, recorder: Recorder, inputs: StepInputs, state: State, weights: Weights, *, pieces: bool) -> Self:
        """To be recorded. `inputs`: of the size of every run."""
        static = StaticInputs.copied(_kept(inputs, pieces), state, weights)
        return cls(recorder, static, len(inputs.plans), pieces=pieces)

    def beside(self, inputs: StepInputs) -> RecordedStep:
        """Another one, to be recorded, for steps whose plans say what rows share; its other inputs are the same."""
        return RecordedStep(self._recorder, self.static.beside(inputs), self._plans, pieces=False)

    def record(self, step: StepFunction, state: State, weights: Weights) -> None:
        """Raises RuntimeError for an op that asks the device something, or copies from plain host memory, and
        AttributeError for one that reads the plan and knows no seams."""
        seams = tuple(_Numbered(self._cut, number) for number in range(self._plans))
        given = replace(self.static.inputs, plans=seams) if self._in_pieces else self.static.inputs
        self._open()
        try:
            self._outputs, _ = step(given, state, weights)
        except Exception:
            with suppress(RuntimeError):  # nor can a recording that failed be ended
                self._pieces[-1][0].end()
            raise
        self._pieces[-1][0].end()

    def _open(self) -> None:
        graph = self._recorder.graph()
        self._pieces.append((graph, None, 0))
        graph.begin()

    def _cut(self, call: Call, number: int) -> None:
        graph, _, _ = self._pieces[-1]
        graph.end()
        self._pieces[-1] = (graph, call, number)
        self._open()

    def replay(self, inputs: StepInputs, state: State, weights: Weights) -> StepOutputs:
        """Run it. Raises UnsupportedOperation for another state or other weights."""
        self.static.take(_kept(inputs, self._in_pieces), state, weights)
        for graph, call, number in self._pieces:
            graph.replay()
            if call is not None:
                call(inputs.plans[number])
        outputs: StepOutputs = mapped(self._outputs, torch.clone)
        return outputs


def _kept(inputs: StepInputs, pieces: bool) -> StepInputs:
    """What lies at fixed addresses."""
    return replace(inputs, plans=()) if pieces else inputs


class _Numbered(Seam):
    """The seam of one planner's ops."""

    def __init__(self, cut: Callable[[Call, int], None], number: int) -> None:
        self._cut, self._number = cut, number

    def cut(self, call: Call) -> None:
        self._cut(call, self._number)
