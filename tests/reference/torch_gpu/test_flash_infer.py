"""Prompts by FlashInfer: what it is told about pages and rows is right, by a stand-in that computes from just that."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hardpoint_cuda import flash_infer, flash_plans
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


class Wrapper:
    """Attends what `plan` was told, one row at a time, in float32."""

    made = 0

    def __init__(self, space: torch.Tensor, layout: str, *, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa2")

    def plan(self, starts: torch.Tensor, ends: torch.Tensor, pages: torch.Tensor, lasts: torch.Tensor, *shape: int,
             causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None,
             q_data_type: torch.dtype) -> None:  # fmt: skip
        assert causal
        assert all(array.dtype == torch.int32 for array in (starts, ends, pages, lasts))
        assert int(ends[-1]) == len(pages)
        type(self).made += 1
        self.rows = [
            (slice(int(starts[r]), int(starts[r + 1])), pages[int(ends[r]) : int(ends[r + 1])].long(), int(lasts[r]))
            for r in range(len(lasts))
        ]
        self.shape, self.scale, self.window, self.cap = shape, sm_scale, window_left, logits_soft_cap

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, width, page = self.shape
        assert q.shape[1:] == (heads, width)
        for part, pages, last in self.rows:
            length = (len(pages) - 1) * page + last
            keys, values = (
                pool[pages].flatten(0, 1)[:length].float().repeat_interleave(heads // kv_heads, 1) for pool in cache
            )
            new = part.stop - part.start
            distance = torch.arange(length - new, length)[:, None] - torch.arange(length)[None, :]
            seen = (distance >= 0) & ((distance <= self.window) | (self.window < 0))
            score = torch.einsum("qhd,khd->hqk", q[part].float(), keys) * self.scale
            if self.cap is not None:
                score = self.cap * torch.tanh(score / self.cap)
            weight = score.masked_fill(~seen, float("-inf")).softmax(-1)
            out[part] = torch.einsum("hqk,khd->qhd", weight, values).to(out.dtype)
        return out


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for FlashInfer; `on_disk` says whether its kernels are compiled."""
    state = SimpleNamespace(on_disk=True)
    package, jit = ModuleType("flashinfer"), ModuleType("flashinfer.jit")
    package.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    jit.gen_batch_prefill_module = lambda *kind: SimpleNamespace(is_compiled=state.on_disk, is_aot=False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.setattr(flash_infer, "_WIDTHS", (16, 32))
    monkeypatch.setattr(flash_infer, "_WORKSPACE", 16)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None))
    return state


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
    monkeypatch.setattr(flash_infer.Trial, "_TOKENS", 16)
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
        assert seconds == [True, False]
        before = Wrapper.made
        found, wanted = run(ours, case), run(REFERENCE["attention"], case)
    assert (Wrapper.made > before) is (slow == "triton")
    assert len(seconds) == 2
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
