"""The plugin's own tests: what the kit cannot know, and the kit itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from acme_npu.memory import CHIP, HostAccess
from acme_npu.platform import AcmePlatform

from hardpoint_platforms.batch import AttentionBatch, SampleResult, SamplingInputs
from hardpoint_platforms.conformance.catalogue import own_groups
from hardpoint_platforms.conformance.runner import Selection, conduct
from hardpoint_platforms.conformance.subject import of_platform
from hardpoint_platforms.conformance.verdict import Status
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import WeightSpec
from hardpoint_platforms.program import Bucket, StepInputs, StepOutputs, Weights
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, LayerCache, State


@pytest.fixture
def device() -> Any:
    opened = AcmePlatform().open(0, {"memory_mb": 64})
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: torch.equal(x, x),
    ],
)
def test_the_host_reads_nothing(device: Any, read: Any) -> None:
    with pytest.raises(HostAccess, match=r"Device\.to_host"):
        read(device.to_device(torch.ones(3)))


def test_host_tensors_do_not_mix(device: Any) -> None:
    with pytest.raises(HostAccess, match=r"Device\.to_device"):
        device.to_device(torch.ones(3)) + torch.ones(3)


def test_a_handle_prints_without_its_data(device: Any) -> None:
    assert "7.25" not in f"{device.to_device(torch.full((2,), 7.25))}"


def test_every_byte_is_counted_once_and_given_back(device: Any) -> None:
    before = CHIP.used
    base = device.zeros((1024,), torch.float32)
    views = (base.view(32, 32), base[5:], base.add_(1))
    assert CHIP.used - before == 4096
    assert device.to_host(views[0]).sum() == 1024
    with pytest.raises(OutOfDeviceMemory, match="do not fit"):
        device.zeros((CHIP.total,), torch.uint8)
    del base, views
    assert CHIP.used == before


def batch_of(new: int, before: int) -> AttentionBatch:
    """One request of `before + new` tokens on page 1."""
    slots = np.arange(before, before + new, dtype=np.int32) + 16
    table = np.array([[1]], np.int32)
    starts, lengths = np.array([0, new], np.int32), np.array([before + new], np.int32)
    return AttentionBatch(starts, lengths, (table,), (slots,), 16, 1, new)


def test_a_program_is_split_by_a_recurrent_op_and_advances_its_state_once(device: Any) -> None:
    """Steps of one token, each twice: captured and replayed, and op by op."""
    spec = {"weight": WeightSpec((8, 3), torch.float32)}
    instance = CONTRACTS["conv_state"].instance("conv", torch.float32, spec, channels=8, kernel=3, activation=None)
    (provider,) = [one for one in device.providers() if one.op == "conv_state"]
    weights = ((device.to_device(torch.arange(1.0, 25.0).view(8, 3)),),)
    layout = CacheLayout((CacheGroup((0,)),), (LayerCache((("conv", 2, 8),)),), 16, torch.float32)
    kernel = provider.build(instance)

    def step(inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        x = (inputs.token_ids + 1).float()[:, None].expand(-1, 8)
        out, state = kernel(x, state, inputs.plans[0], weights[0])
        return StepOutputs(SampleResult(inputs.token_ids), inputs.token_ids > 0, out * 2), state

    program = device.programs().build(step, Bucket(1, 1, query=1))
    states = [device.state_cache().allocate(layout, 2) for _ in range(2)]
    for place in range(1, 6):  # the recorded step finds a state, which it must not advance twice
        ids = device.to_device(torch.tensor([7 * place]))
        draws = device_draws(device)
        inputs = StepInputs(ids, ids, (provider.planner().plan(batch_of(1, place)),), ids, draws)
        ours, states[0] = program.run(inputs, states[0], weights)
        theirs, states[1] = step(inputs, states[1], weights)
        assert torch.equal(*(device.to_host(outputs.hidden) for outputs in (ours, theirs)))
    assert program.describe().endswith("split by 1 host calls: 1 x conv_state")
    assert not device.programs().holds(provider)


def device_draws(device: Any) -> SamplingInputs:
    floats, ints = device.zeros((1,), torch.float32), device.zeros((1,), torch.int64)
    return SamplingInputs(floats, ints, floats, floats, ints, ints, all_greedy=True)


@pytest.mark.parametrize("group", ["state", "programs"])
def test_the_kit(group: str) -> None:
    subject = of_platform(AcmePlatform(), "acme", "acme-npu-hardpoint")
    report = conduct(subject, own_groups(), Selection(level=5, groups=(group,)))
    assert not report.failures()
    assert any(verdict.status is Status.PASS for verdict in report.verdicts)
