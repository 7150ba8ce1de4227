"""Recorded steps, on the CPU: a graph here is a list of torch ops that are called again on the same tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu.attention import TritonAttention
from hardpoint_torch_gpu.graphs import GraphBuilder
from hardpoint_torch_gpu.plan import GpuPlanner
from hardpoint_torch_gpu.seams import Seam
from host_graphs import WIDTH, host_builder, inputs_of, layers, step
from torch.utils._pytree import tree_leaves

from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.program import ANY_SIZE, Bucket, SamplingShape, StepInputs, StepOutputs

pytestmark = pytest.mark.reference


def reading_step(inputs: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
    """An op that knows no seams."""
    return step(replace(inputs, token_ids=(inputs.token_ids + inputs.plans[0].first) % 40), state, weights)


@pytest.fixture
def builder() -> GraphBuilder:
    return host_builder()


@pytest.fixture
def weights() -> tuple[tuple[torch.Tensor, ...], ...]:
    return layers()


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
    mixed = [(b.tokens, b.requests) for b in buckets if b.query == 0 and b.sampling is SamplingShape.GREEDY]
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
