"""Prompts by FlashInfer: what it is told about pages and rows is right, by a stand-in that computes from just that."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flash_stand_in import Wrapper, install, shorten_trials
from hardpoint_cuda import flash_plans
from hardpoint_cuda.flash_infer import FlashInferAttention, FlashPlan, FlashPlanner, backend_for
from hardpoint_torch_gpu.measured import Measurements, Way

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

REFERENCE = {provider.op: provider for provider in reference_providers()}
SAMPLES = tuple(CONTRACTS["attention"].samples(torch.float16))
#: Samples whose score FlashInfer does not have.
OTHERS = ("alibi", "sinks")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return install(monkeypatch)


def provider(*, compile: bool = False, measurements: Measurements | None = None) -> FlashInferAttention:
    planner = FlashPlanner(ReferenceDevice().upload, torch.device("cpu"), "fa2")
    return FlashInferAttention(planner, "fa2", measurements or Measurements(), compile=compile)


@pytest.mark.parametrize("case", SAMPLES, ids=[case.instance.where for case in SAMPLES])
def test_agrees_with_the_reference(installed: SimpleNamespace, case: Sample) -> None:
    ours = provider()
    answer = ask(CONTRACTS["attention"], ours, case.instance)
    attrs = case.instance.attrs
    if attrs["alibi"] is not None or attrs["sinks"] or attrs["v_head_dim"] != attrs["head_dim"]:
        assert not answer
        return
    assert answer, answer.reason
    with torch.inference_mode():
        found, wanted = run(ours, case), run(REFERENCE["attention"], case)
    tolerance = CONTRACTS["attention"].tolerance[torch.float16]
    torch.testing.assert_close(found[0], wanted[0], atol=tolerance.atol, rtol=tolerance.rtol)


def test_a_cache_of_another_dtype_is_left_to_the_other_kernel(installed: SimpleNamespace) -> None:
    """FlashInfer's kernel is compiled for a cache of the activations' dtype; the op does not know the cache's."""
    before, ours = Wrapper.made, provider()
    for case in SAMPLES:
        if not ask(CONTRACTS["attention"], ours, case.instance):
            continue

        def wide(make: Any = case.make) -> tuple[Any, ...]:
            q, k, v, state, *others = make()
            return q, k, v, [(keys.float(), values.float()) for keys, values in state], *others

        other = replace(case, make=wide)
        with torch.inference_mode():
            found, wanted = run(ours, other), run(REFERENCE["attention"], other)
        torch.testing.assert_close(found[0], wanted[0], atol=4e-3, rtol=4e-3)
    assert Wrapper.made == before


def test_the_samples_reach_it(installed: SimpleNamespace) -> None:
    """At least one of the samples above has rows with several tokens, so that the stand-in computed something."""
    before = Wrapper.made
    for case in SAMPLES:
        if ask(CONTRACTS["attention"], provider(), case.instance):
            run(provider(), case)
    assert Wrapper.made > before


@pytest.mark.parametrize("slow", ["flashinfer", "triton"])
def test_prompts_go_to_the_kernel_that_was_measured_faster(
    installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Both are tried on the same prompts; the trial is small here, the interpreter is slow."""
    shorten_trials(monkeypatch)
    seconds: list[int] = []

    def timer(way: Way) -> float:
        before = Wrapper.made
        way()
        flash = Wrapper.made > before
        seconds.append(flash)
        return 2e-5 if flash is (slow == "flashinfer") else 1e-5

    case = next(case for case in SAMPLES if case.instance.where == "prefill")
    ours = provider(measurements=Measurements(None, timer))
    with torch.inference_mode():
        ours.build(case.instance)
        assert seconds[:2] == [False, False]  # of decodes
        assert seconds[2:] == [True, False]
        before = Wrapper.made
        found, wanted = run(ours, case), run(REFERENCE["attention"], case)
    assert (Wrapper.made > before) is (slow == "triton")
    assert len(seconds) == 4
    torch.testing.assert_close(found[0], wanted[0], atol=4e-3, rtol=4e-3)


def test_a_kernel_that_is_not_compiled_is_refused_with_what_to_do(installed: SimpleNamespace, monkeypatch: Any) -> None:
    installed.on_disk = False
    plain = SAMPLES[0].instance
    assert "flashinfer=compile" in provider().supports(plain).reason
    monkeypatch.setattr(flash_plans.shutil, "which", lambda name: None)
    assert "no nvcc" in provider(compile=True).supports(plain).reason
    monkeypatch.setattr(flash_plans.shutil, "which", lambda name: "/usr/bin/nvcc")
    assert provider(compile=True).supports(plain)


def test_rows_that_do_not_lie_together_are_left_to_the_other_kernel(installed: SimpleNamespace) -> None:
    planner = FlashPlanner(ReferenceDevice().upload, torch.device("cpu"), "fa2")

    def batch(*queries: int) -> AttentionBatch:
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        table = np.arange(len(queries) * 4, dtype=np.int32).reshape(len(queries), 4)
        slots = np.arange(starts[-1], dtype=np.int32)
        return AttentionBatch(
            starts, np.asarray(queries, np.int32), (table,), (slots,), 4, len(queries), int(starts[-1])
        )

    assert isinstance(planner.plan(batch(1, 1, 5, 7)), FlashPlan)
    assert not isinstance(planner.plan(batch(5, 1, 7)), FlashPlan)
    assert not isinstance(planner.plan(batch(1, 1)), FlashPlan)


def test_hopper_has_a_family_of_its_own() -> None:
    assert [backend_for(at) for at in ((8, 0), (9, 0), (10, 0))] == ["fa2", "fa3", "fa2"]
