"""What runs before serving so that its kernels are there: larger steps, other draws, kinds that cannot be recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu.graphs import GraphBuilder, decode_sizes
from hardpoint_torch_gpu.rehearsal import Rehearsal, RehearsalBucket, draws, rehearsals
from host_graphs import host_builder, inputs_of, layers, step
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hardpoint_platforms.batch import LogitBias, Penalties, SamplingInputs
from hardpoint_platforms.program import ANY_SIZE, Bucket, SamplingShape, StepInputs, StepOutputs

pytestmark = pytest.mark.reference
FULL = SamplingShape.FULL


def sizes(max_tokens: int, max_requests: int, recorded: int) -> list[tuple[int, int]]:
    return [(b.tokens, b.requests) for b in rehearsals(max_tokens, max_requests, recorded) if b.sampling is not FULL]


def test_larger_steps_than_the_recorded_ones() -> None:
    assert sizes(8192, 256, 512) == [(513, 256), (1024, 256), (2048, 256), (4096, 256)]
    assert sizes(1500, 2000, 512) == [(513, 513), (1024, 1024), (1500, 1500)]
    assert sizes(300, 16, 256) == [(257, 16), (300, 16)]
    assert sizes(512, 256, 512) == []


@pytest.mark.parametrize(("max_tokens", "max_requests", "rows"), [(8192, 256, 8), (8192, 3, 3), (4, 4, 4)])
def test_one_step_with_other_draws(max_tokens: int, max_requests: int, rows: int) -> None:
    found = [b for b in rehearsals(max_tokens, max_requests, max_tokens) if b.sampling is FULL]
    assert found == [RehearsalBucket(rows, rows, 0, FULL)]


def test_no_step_is_padded_to_one() -> None:
    for bucket in rehearsals(4096, 256, 512):
        assert not bucket.fits(1, 1, 1, SamplingShape.GREEDY)
        assert Bucket(bucket.tokens, bucket.requests, 0, bucket.sampling).fits(1, 1, 1, SamplingShape.GREEDY)


def test_they_come_before_what_takes_any_size() -> None:
    buckets = host_builder().buckets(1024, 64)
    assert [b.tokens for b in buckets if isinstance(b, RehearsalBucket)] == [8, 513, 1024]
    assert buckets[-1] == ANY_SIZE
    assert buckets[-2].tokens == 1024


def full_draws(rows: int) -> SamplingInputs:
    floats, ints = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
    return SamplingInputs(
        floats, ints, floats, floats, ints, ints,
        penalties=Penalties(ints[:, None], ints, floats, floats, floats),
        bias=LogitBias(ints, ints, floats), allowed=ints[:, None].int(), num_logprobs=20,
    )  # fmt: skip


def test_each_set_of_draws_differs_in_what_is_launched() -> None:
    found = [
        (one.filters, one.allowed is not None, one.penalties is not None, one.bias is not None, one.num_logprobs)
        for one in draws(full_draws(2))
    ]
    assert found == [
        (True, True, True, True, 20),
        (True, False, True, True, 0),
        (False, True, False, False, None),
        (False, False, False, False, None),
    ]
    assert not any(one.all_greedy for one in draws(full_draws(2)))


class Counted:
    """The step, with the sizes and draws of its calls."""

    def __init__(self, fails: type[Exception] | None = None) -> None:
        self.calls: list[tuple[int, int | None]] = []
        self._fails = fails

    def __call__(self, inputs: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
        self.calls.append((len(inputs.token_ids), inputs.sampling.num_logprobs))
        if self._fails is not None:
            raise self._fails("no room\nfor it")
        return step(inputs, state, weights)


def prepared(builder: GraphBuilder, counted: Counted, bucket: Bucket) -> Any:
    """The state after it."""
    program, state = builder.build(counted, bucket), ((torch.zeros(8),),)
    assert isinstance(program, Rehearsal)
    inputs = inputs_of(bucket.tokens, bucket.requests, 0, 1)
    if bucket.sampling is FULL:
        inputs = replace(inputs, sampling=full_draws(bucket.requests))
    return program.prepare(inputs, state, layers())


def test_it_runs_and_is_not_recorded() -> None:
    builder, counted = host_builder(), Counted()
    state = prepared(builder, counted, RehearsalBucket(513, 64, 0, SamplingShape.GREEDY))
    assert counted.calls == [(513, None)]
    assert state[0][0].any()
    prepared(builder, counted, RehearsalBucket(8, 8, 0, FULL))
    assert counted.calls[1:] == [(8, 20), (8, 0), (8, None), (8, None)]
    assert not builder.captured


def test_too_little_memory_does_not_end_the_start(caplog: pytest.LogCaptureFixture) -> None:
    prepared(host_builder(), Counted(torch.OutOfMemoryError), RehearsalBucket(513, 64, 0, SamplingShape.GREEDY))
    assert "a step of 513 tokens could not run before serving: no room" in caplog.text
    with pytest.raises(ZeroDivisionError):
        prepared(host_builder(), Counted(ZeroDivisionError), RehearsalBucket(513, 64, 0, SamplingShape.GREEDY))


def test_sizes_of_a_kind_that_cannot_be_recorded_run_all_the_same() -> None:
    counted = Counted()

    def asking(inputs: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
        if any("Ops" in type(mode).__name__ for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("asks the device")
        return counted(inputs, state, weights)

    builder = host_builder(put_off=True)
    for bucket in builder.buckets(64, 64)[:-1]:
        inputs = inputs_of(bucket.tokens, bucket.requests, 0, 1)
        builder.build(asking, bucket).prepare(inputs, ((torch.zeros(8),),), layers())
    assert not builder.captured
    assert {*decode_sizes(64), 32} <= {tokens for tokens, _ in counted.calls}
