"""Models cut over four virtual chips of the processor: the tokens of one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("jax")

from hardpoint_tpu.mesh import Collectives
from hardpoint_tpu.platform import TpuPlatform
from tpu_bench import FAST

from hardpoint.conformance import ranks, tiny
from hardpoint.conformance.tiny import Crowd, crowd
from hardpoint_platforms.communication import TENSOR_AXIS, Mesh
from hardpoint_platforms.conformance.runner import Selection, conduct
from hardpoint_platforms.conformance.subject import of_platform
from hardpoint_platforms.conformance.verdict import Status
from hardpoint_platforms.errors import DeviceUnavailable, UnsupportedOperation
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, LayerCache

pytestmark = pytest.mark.reference

FOUR = Mesh((TENSOR_AXIS,), (4,))


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    """Four chips as one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        opened = TpuPlatform().open_mesh(0, FOUR, FAST)
    yield opened
    opened.close()


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v2", marks=pytest.mark.long)])
def test_tokens_are_those_of_one_device(four: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that is dealt out, shared key and value heads, preemptions; nothing is compiled on the way."""
    monkeypatch.setitem(tiny.SMALL, "vocab_size", 120)
    messages = crowd(5)
    served = Crowd(four, family, torch.float32, torch.float32, 16, whole_experts=True)
    late = four.late_compiles
    ours = served.serve(messages)
    assert four.late_compiles == late
    theirs = Crowd(ReferenceDevice(), family, torch.float32, torch.float32, 16).serve(messages)
    assert served.hits > 0
    for name, answer in theirs.items():
        assert ours[name].tokens == answer.tokens, name
        assert ours[name].logprobs == pytest.approx(answer.logprobs, abs=2e-3)


def test_the_kits_group() -> None:
    subject = replace(of_platform(TpuPlatform(), "tpu", "hardpoint-tpu"), options=FAST)
    report = conduct(subject, [ranks.GROUP], Selection(cases=("ranks/qwen3_moe/*2?ranks*",)))
    assert [verdict.status for verdict in report.verdicts] == [Status.PASS], report.failures()


@pytest.mark.parametrize("count", [2, 4])
def test_the_kits_level_four(count: int) -> None:
    subject = replace(of_platform(TpuPlatform(), "tpu", "hardpoint-tpu"), options=FAST)
    report = conduct(subject, [ranks.GROUP], Selection(cases=(f"ranks/communicator/*of-{count}-ranks*",)))
    assert [verdict.status for verdict in report.verdicts] == [Status.PASS] * 6, report.failures()


def test_the_kit_notices_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collectives, "all_reduce", lambda self, x, axis: x)
    subject = replace(of_platform(TpuPlatform(), "tpu", "hardpoint-tpu"), options=FAST)
    report = conduct(subject, [ranks.GROUP], Selection(cases=("ranks/communicator/all_reduce*of-2-ranks*",)))
    assert [verdict.status for verdict in report.verdicts] == [Status.FAIL]
    assert "all_reduce at rank 0" in report.failures()[0].message


@pytest.mark.long
def test_two_engines_beside_each_other_on_chips_of_their_own() -> None:
    """Data parallel: replicas of two chips each in one process give the same tokens."""
    answers = []
    for first in (0, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_NUM_CPU_DEVICES", "4")
            device = TpuPlatform().open_mesh(first, Mesh((TENSOR_AXIS,), (2,)), FAST)
        served = Crowd(device, "llama", torch.float32, torch.float32, 16)
        chips = {shard.device.id for array in _arrays(served) for shard in array.addressable_shards}
        assert chips == {first, first + 1}
        answers.append({name: answer.tokens for name, answer in served.serve(crowd(7)).items()})
        device.close()
    assert answers[0] == answers[1]


def _arrays(served: Crowd) -> list[Any]:
    return [tensor._elem for packed in served._runner._stages[0].weights for tensor in packed]


def test_weights_and_state_lie_apart_and_everything_else_on_each_chip(four: Any) -> None:
    assert four.mesh == FOUR
    ones = torch.ones(3, 2)
    weights = four.load_ranks([lambda chip, rank=rank: ((chip.to_device(ones * rank),),) for rank in range(4)])
    ((tensor,),) = weights
    parts = tensor._elem.addressable_shards
    assert [part.data.shape for part in parts] == [(3, 2)] * 4
    assert [float(part.data[0, 0]) for part in parts] == [0.0, 1.0, 2.0, 3.0]
    assert all(part.data.shape == (3, 2) for part in four.to_device(ones)._elem.addressable_shards)
    layout = CacheLayout((CacheGroup((0,)),), (LayerCache((("k", 1, 8), ("v", 1, 8))),), 16, torch.float32)
    cache = four.state_cache()
    state = cache.allocate(layout, 5)
    assert all(part.data.shape == (5, 16, 8) for part in state.tree("a look").layers[0][0]._elem.addressable_shards)
    state = cache.copy_pages(state, [1], [2])
    with pytest.raises(UnsupportedOperation, match="cut over chips"):
        cache.export_pages(state, layout, [1])


def test_memory_is_that_of_one_chip(four: Any, device: Any) -> None:
    assert four.memory().total == pytest.approx(device.memory().total / 4, rel=0.01)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "index"])
def test_collectives_inside_a_program(four: Any, name: str) -> None:
    x = torch.arange(16.0).reshape(4, 4)
    comm = four.communicator(FOUR, 0, "")
    runtime = four._runtime
    own = [x + 100 * rank for rank in range(4)]
    wanted = {
        "all_reduce": sum(own),
        "all_gather": torch.cat(own, 1),
        "reduce_scatter": None,
        "broadcast": own[2],
        "index": torch.tensor(3 * 100),
    }
    (given,) = four.load_ranks([lambda chip, rank=rank: ((chip.to_device(own[rank]),)) for rank in range(4)])

    def body(tensor: torch.Tensor) -> torch.Tensor:
        if name == "index":
            # the largest of all places, seen by everybody
            return comm.all_gather((comm.index(TENSOR_AXIS) * 100)[None], TENSOR_AXIS, 0).max()
        if name == "all_to_all":
            return torch.stack(comm.all_to_all([tensor[i] for i in range(4)], TENSOR_AXIS))
        if name == "broadcast":
            return comm.broadcast(tensor, TENSOR_AXIS, 2)
        more = {"all_reduce": (), "all_gather": (1,), "reduce_scatter": (0,)}[name]
        return getattr(comm, name)(tensor, TENSOR_AXIS, *more)

    def everybodys(tensor: torch.Tensor) -> torch.Tensor:
        return comm.all_gather(body(tensor)[None], TENSOR_AXIS, 0)

    each = four.to_host(runtime.routine(everybodys)(given))
    for rank in range(4):
        expected = wanted.get(name)
        if name == "reduce_scatter":
            expected = sum(own)[rank : rank + 1]
        if name == "all_to_all":
            expected = torch.stack([part[rank] for part in own])
        assert torch.equal(each[rank], expected), rank


def test_what_runs_as_one_program_has_no_rank(four: Any) -> None:
    comm = four.communicator(FOUR, 0, "")
    assert isinstance(comm, Collectives)
    for ask in (lambda: comm.rank, lambda: comm.send(torch.ones(1), 1), lambda: comm.receive(torch.ones(1), 1)):
        with pytest.raises(UnsupportedOperation, match="one program runs all ranks"):
            ask()


def test_ranks_of_other_processes_are_refused(four: Any) -> None:
    with pytest.raises(UnsupportedOperation, match="no ranks to join"):
        four.communicator(Mesh((TENSOR_AXIS,), (2,)), 0, "tcp://127.0.0.1:1")


def test_more_chips_than_there_are() -> None:
    with pytest.raises(DeviceUnavailable, match="9 chips from tpu:0 on are wanted, JAX has 4") as error:
        TpuPlatform().open_mesh(0, Mesh((TENSOR_AXIS,), (9,)), FAST)
    assert "JAX_NUM_CPU_DEVICES=9" in str(error.value.hint)
