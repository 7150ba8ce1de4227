"""Graphs on the host: lists of torch ops that are called again on the same tensors; and a step to record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hardpoint_torch_gpu.compiles import LateCompiles
from hardpoint_torch_gpu.graphs import GraphBuilder
from hardpoint_torch_gpu.recording import Graph
from hardpoint_torch_gpu.seams import Seam
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hardpoint_platforms.batch import SampleResult, SamplingInputs
from hardpoint_platforms.program import SamplingShape, StepInputs, StepOutputs

WIDTH = 8


class Ops(TorchDispatchMode, Graph):
    """Notes every op with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made

    def begin(self) -> None:
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class HostRecorder:
    """Makes such graphs."""

    def __init__(self) -> None:
        self.graphs: list[Ops] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def graph(self) -> Ops:
        self.graphs.append(Ops())
        return self.graphs[-1]

    def recover(self) -> None:
        return None


@dataclass(frozen=True)
class Plan:
    """Adds up the tokens before each row's own, as attention would read them."""

    first: int


def running_sum(x: torch.Tensor, state: Any, plan: Plan | Seam) -> torch.Tensor:
    """An op with state whose launch depends on the plan."""
    out = torch.empty_like(x)

    def call(now: Plan) -> None:
        state[0][0].add_(x[now.first :].sum(0))
        out.copy_(x.cumsum(0) + state[0][0])

    if isinstance(plan, Seam):
        plan.cut(call)
    else:
        call(plan)
    return out


def step(inputs: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
    """Two layers with such an op each."""
    x = torch.nn.functional.embedding(inputs.token_ids, weights[0][0])
    for layer in weights[1:]:
        x = x + running_sum(x @ layer[0], state, inputs.plans[0])
    picked = x.index_select(0, inputs.logits_index)
    return StepOutputs(SampleResult(picked.argmax(-1)), picked.isfinite().all(-1), picked), state


def inputs_of(tokens: int, requests: int, first: int, seed: int) -> StepInputs:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (tokens,), generator=generator)
    floats, ints = torch.zeros(requests), torch.zeros(requests, dtype=torch.int64)
    sampling = SamplingInputs(floats, ints, floats, floats, ints, ints, all_greedy=True, filters=False)
    return StepInputs(
        ids, torch.arange(tokens), (Plan(first),), torch.arange(requests) * min(2, tokens // requests), sampling
    )


def host_builder(*shapes: SamplingShape, put_off: bool = False) -> GraphBuilder:
    """For up to 64 decodes; its graphs are those of `HostRecorder`."""
    made = GraphBuilder(torch.device("cpu"), shapes or (SamplingShape.GREEDY,), 64, LateCompiles(), put_off=put_off)
    made.recorder = HostRecorder()  # type: ignore[assignment]
    return made


def layers() -> tuple[tuple[torch.Tensor, ...], ...]:
    """Weights of `step`."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((40, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))
    return tuple((torch.randn(shape, generator=generator),) for shape in shapes)
