"""Ops fused by torch.compile, here by a backend that traces and runs the same torch ops."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu import fused_reference
from hardpoint_torch_gpu.fused_reference import Fused, FusedReference, fused_references
from host_graphs import Ops

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference
REFERENCE = {provider.op: provider for provider in reference_providers()}
#: Ops whose reference is one graph of torch ops; rope writes into what it gets.
WHOLE = ("norm", "rope", "moe_route")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, FusedReference]:
    torch.compiler.reset()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(fused_reference._CACHE, raising=False)
    made = {provider.op: provider for provider in fused_references("aot_eager")}
    assert os.environ[fused_reference._CACHE] == str(tmp_path / "hardpoint" / "inductor")
    monkeypatch.delenv(fused_reference._CACHE)
    return made  # type: ignore[return-value]


def first(op: str) -> Sample:
    return next(iter(CONTRACTS[op].samples(torch.float32)))


@pytest.mark.parametrize("op", WHOLE)
def test_agrees_with_the_reference_and_is_compiled(op: str, fused: dict[str, FusedReference], caplog: Any) -> None:
    with torch.inference_mode():
        found, wanted = run(fused[op], first(op)), run(REFERENCE[op], first(op))
    torch.testing.assert_close(found, wanted)
    assert not [one for one in caplog.records if one.name == fused_reference.__name__]
    assert "fused by torch.compile" in fused[op].supports(first(op).instance).reason


def test_layers_share_what_is_compiled(fused: dict[str, FusedReference]) -> None:
    case = first("norm")
    other = CONTRACTS["norm"].instance("layers.7", torch.float32, case.instance.weights, **case.instance.attrs)
    assert other.where != case.instance.where
    assert fused["norm"].build(case.instance) is fused["norm"].build(other)
    wide = CONTRACTS["norm"].instance("layers.7", torch.float16, case.instance.weights, **case.instance.attrs)
    assert fused["norm"].build(case.instance) is not fused["norm"].build(wide)


def test_any_number_of_tokens_takes_one_compilation() -> None:
    torch.compiler.reset()
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    kernel = Fused(lambda x: (x * 2 + 1).sum(-1), backend, "doubling")  # type: ignore[arg-type]
    for tokens in (4, 7, 64, 512):
        x = torch.randn(tokens, 6)
        torch.testing.assert_close(kernel(x), (x * 2 + 1).sum(-1))
    assert len(compiled) == 1


def test_what_cannot_be_compiled_is_called_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    kernel = Fused(lambda x: x[: int(x.sum().item())].tolist(), "eager", "asking")
    assert kernel(torch.tensor([1.0, 1.0, 0.0])) == [1.0, 1.0]
    assert kernel(torch.tensor([1.0, 0.0, 0.0])) == [1.0]
    (told,) = [record.getMessage() for record in caplog.records if record.name == fused_reference.__name__]
    assert told.startswith("asking is not fused: ")


def test_a_mode_that_watches_sees_every_op() -> None:
    """As the walk before the start does, in which no kernel is launched."""
    torch.compiler.reset()
    kernel = Fused(lambda x: x * 2 + 1, "inductor", "doubling")
    watch = Ops()
    with watch:
        kernel(torch.ones(3))
    assert [str(call[0]) for call in watch.calls][-2:] == ["aten.mul.Tensor", "aten.add.Tensor"]


def test_ops_with_a_plan_are_left_alone(fused: dict[str, FusedReference]) -> None:
    paged = {"attention", "mla_attention", "conv_state", "ssm_scan", "gated_delta"}
    assert not {*paged, "rotary_attention", "gated_mlp"} & fused.keys()
