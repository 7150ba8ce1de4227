"""Recorded steps, on the CPU: a graph here is a list of torch ops that are called again on the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu.attention import TritonAttention
from hardpoint_torch_gpu.compiles import LateCompiles
from hardpoint_torch_gpu.graphs import GraphBuilder
from hardpoint_torch_gpu.plan import GpuPlanner
from hardpoint_torch_gpu.recording import Graph
from hardpoint_torch_gpu.seams import Seam
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hardpoint_platforms.batch import SampleResult, SamplingInputs
from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.program import ANY_SIZE, Bucket, SamplingShape, StepInputs, StepOutputs

pytestmark = pytest.mark.reference
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


def reading_step(inputs: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
    """An op that knows no seams."""
    return step(replace(inputs, token_ids=(inputs.token_ids + inputs.plans[0].first) % 40), state, weights)


def inputs_of(tokens: int, requests: int, first: int, seed: int) -> StepInputs:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (tokens,), generator=generator)
    floats, ints = torch.zeros(requests), torch.zeros(requests, dtype=torch.int64)
    sampling = SamplingInputs(floats, ints, floats, floats, ints, ints, all_greedy=True, filters=False)
    return StepInputs(ids, torch.arange(tokens), (Plan(first),), torch.arange(requests) * 2, sampling)


@pytest.fixture
def builder() -> GraphBuilder:
    made = GraphBuilder(torch.device("cpu"), (SamplingShape.GREEDY,), 64, LateCompiles())
    made.recorder = HostRecorder()  # type: ignore[assignment]
    return made


@pytest.fixture
def weights() -> tuple[tuple[torch.Tensor, ...], ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((40, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))
    return tuple((torch.randn(shape, generator=generator),) for shape in shapes)


def fresh_state() -> Any:
    return ((torch.zeros(WIDTH),),)


def test_pieces_give_what_the_step_gives(builder: GraphBuilder, weights: Any) -> None:
    program, state, wanted_state = (
        builder.build(step, Bucket(16, 4, 0, SamplingShape.GREEDY)),
        fresh_state(),
        fresh_state(),
    )
    state = program.prepare(inputs_of(16, 4, 0, 0), state, weights)
    assert len(builder.recorder.graphs) == 3  # type: ignore[attr-defined]
    state[0][0].zero_()
    for seed, first in ((1, 0), (2, 9), (3, 15), (4, 3)):
        inputs = inputs_of(16, 4, first, seed)
        outputs, state = program.run(inputs, state, weights)
        wanted, wanted_state = step(inputs, wanted_state, weights)
        torch.testing.assert_close(outputs.hidden, wanted.hidden)
        assert outputs.sample.token_ids.tolist() == wanted.sample.token_ids.tolist()
        torch.testing.assert_close(state[0][0], wanted_state[0][0])
    assert "1 in pieces for mixed steps of up to 16 tokens" in program.describe()


def test_results_outlive_the_next_run(builder: GraphBuilder, weights: Any) -> None:
    program, state = builder.build(step, Bucket(16, 4, 0, SamplingShape.GREEDY)), fresh_state()
    state = program.prepare(inputs_of(16, 4, 0, 0), state, weights)
    first, state = program.run(inputs_of(16, 4, 0, 1), state, weights)
    before = first.hidden.clone()
    program.run(inputs_of(16, 4, 0, 2), state, weights)
    assert torch.equal(first.hidden, before)


def test_an_op_that_reads_the_plan_is_called_op_by_op(builder: GraphBuilder, weights: Any) -> None:
    program, state = builder.build(reading_step, Bucket(16, 4, 0, SamplingShape.GREEDY)), fresh_state()
    state = program.prepare(inputs_of(16, 4, 0, 0), state, weights)
    state[0][0].zero_()
    outputs, _ = program.run(inputs_of(16, 4, 5, 1), state, weights)
    wanted, _ = reading_step(inputs_of(16, 4, 5, 1), fresh_state(), weights)
    torch.testing.assert_close(outputs.hidden, wanted.hidden)
    assert "mixed steps op by op: '_Numbered' object has no attribute 'first'" in program.describe()


def test_another_state_is_refused(builder: GraphBuilder, weights: Any) -> None:
    program, state = builder.build(step, Bucket(16, 4, 0, SamplingShape.GREEDY)), fresh_state()
    state = program.prepare(inputs_of(16, 4, 0, 0), state, weights)
    with pytest.raises(UnsupportedOperation, match="recorded with"):
        program.run(inputs_of(16, 4, 0, 1), fresh_state(), weights)


def test_buckets_go_from_decodes_to_pieces_to_any_size(builder: GraphBuilder) -> None:
    buckets = builder.buckets(256, 48)
    kinds = ["any" if b == ANY_SIZE else "decode" if b.query == 1 else "mixed" for b in buckets]
    assert kinds == sorted(kinds, key=("decode", "mixed", "any").index)
    mixed = [(b.tokens, b.requests) for b in buckets if b.query == 0 and b.tokens]
    assert mixed == [(32, 32), (64, 48), (128, 48), (256, 48)]


class Noted(Seam):
    """Keeps the call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def cut(self, call: Any) -> None:
        self.calls.append(call)


@pytest.mark.parametrize("where", ["mixed with padding", "decode", "sinks and window"])
def test_attention_leaves_its_work_to_the_seam(where: str) -> None:
    """The kernel's own call, with a plan that comes later."""
    contract = CONTRACTS["attention"]
    case = next(case for case in contract.samples(torch.float32) if case.instance.where == where)
    provider = TritonAttention(GpuPlanner(lambda tensors: tuple(tensors)))
    kernel = provider.build(case.instance)
    w = provider.pack(case.instance, case.weights)

    def arguments() -> tuple[Any, ...]:
        *tensors, state, batch = case.make()
        return *tensors, state, provider.planner().plan(batch), w

    *tensors, state, plan, packed = arguments()
    wanted, after = kernel(*tensors, state, plan, packed)
    *tensors, state, plan, packed = arguments()
    seam = Noted()
    out, later = kernel(*tensors, state, seam, packed)
    out.fill_(float("nan"))
    (call,) = seam.calls
    call(plan)
    real = plan.starts[-1]
    assert torch.equal(out[:real], wanted[:real])
    assert out.isfinite().all()
    for ours, theirs in zip(tree_leaves(later), tree_leaves(after), strict=True):
        assert torch.equal(ours, theirs)
