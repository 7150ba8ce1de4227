"""Decodes by FlashInfer: planned for each step into the same buffers, and taken only where measured faster."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_stand_in import DecodeWrapper, install, shorten_trials
from hardpoint_cuda import flash_decode, flash_infer
from hardpoint_cuda.flash_decode import FlashDecodePlan
from hardpoint_cuda.flash_infer import FlashInferAttention, FlashPlanner
from hardpoint_cuda.flash_plans import Kind
from hardpoint_torch_gpu import plan
from hardpoint_torch_gpu.measured import Measurements, Way
from shared_rows import SharedRows

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.attention import _case, _Shape
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import PagedRows, run
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

REFERENCE = {provider.op: provider for provider in reference_providers()}["attention"]


ROWS = PagedRows(((3, 1), (11, 1), (0, 1)), extra_tokens=2, extra_requests=2)
SLID = PagedRows(((30, 1), (22, 1), (3, 1)), windows=(None, 6), extra_tokens=1, extra_requests=1)
DECODES = {
    "rows": _case(torch.float16, "rows", PagedRows(((3, 1), (11, 1), (0, 1)))),
    "padding": _case(torch.float16, "padding", ROWS),
    "tensor cores": _case(torch.float16, "tensor cores", ROWS, _Shape(4, 1, 16, 16)),
    "page of 16": _case(torch.float16, "page of 16", PagedRows(((20, 1), (31, 1)), page_tokens=16)),
    "scale": _case(torch.float16, "scale", ROWS, scale=0.5),
    "window": _case(torch.float16, "window", ROWS, window=5),
    "slid": _case(torch.float16, "slid", SLID, window=6, group=1),
    "softcap": _case(torch.float16, "softcap", ROWS, softcap=2.0),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    shorten_trials(monkeypatch)
    return install(monkeypatch)


def provider(fast: str = "flashinfer", *, compile: bool = False) -> FlashInferAttention:
    """`fast`: which way the clock finds fastest, "" for no clock."""

    def timer(way: Way) -> float:
        before = DecodeWrapper.ran
        way()
        flash = DecodeWrapper.ran != before
        return 1e-5 if flash is (fast == "flashinfer") else 9e-5

    planner = FlashPlanner(ReferenceDevice().upload, torch.device("cpu"), "fa2")
    return FlashInferAttention(planner, "fa2", Measurements(None, timer if fast else None), compile=compile)


@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES)
def test_agrees_with_the_reference(installed: SimpleNamespace, case: Sample) -> None:
    ours, real = provider(), case.make()[-1].num_tokens
    assert ask(CONTRACTS["attention"], ours, case.instance)
    with torch.inference_mode():
        ours.build(case.instance)
        before = DecodeWrapper.ran
        found, wanted = run(ours, case), run(REFERENCE, case)
    assert DecodeWrapper.ran > before
    torch.testing.assert_close(found[0][:real], wanted[0][:real], atol=4e-3, rtol=4e-3)
    assert found[0].isfinite().all()
    for ours_now, theirs in zip(found[1][1], wanted[1][1], strict=True):
        assert torch.equal(ours_now[1:], theirs[1:])  # what is new is stored; page 0 is nobody's


def plain() -> Sample:
    return DECODES["rows"]


@pytest.mark.parametrize("fast", ["triton", ""])
def test_triton_keeps_decodes_where_it_is_faster_or_nobody_asked(installed: SimpleNamespace, fast: str) -> None:
    ours = provider(fast)
    with torch.inference_mode():
        ours.build(plain().instance)
        before = DecodeWrapper.ran
        found, wanted = run(ours, plain()), run(REFERENCE, plain())
    assert DecodeWrapper.ran == before
    torch.testing.assert_close(found[0], wanted[0], atol=4e-3, rtol=4e-3)


def test_a_step_of_as_many_rows_is_planned_into_the_same_buffers(installed: SimpleNamespace) -> None:
    """A graph was recorded with the first plan's kernel and is replayed after the second."""
    case = plain()
    batch: AttentionBatch = case.make()[-1]
    planner = FlashPlanner(ReferenceDevice().upload, torch.device("cpu"), "fa2")
    kind = Kind.of(case.instance)
    planner.decodes.take(kind)
    first = planner.plan(batch)
    assert isinstance(first, FlashDecodePlan)
    wrapper: Any = first.decode(kind).__self__  # type: ignore[attr-defined]
    places = [x.data_ptr() for x in (wrapper.ends, wrapper.pages, wrapper.lasts, wrapper.lists)]
    held = wrapper.lasts.clone()

    batch.sequence_lengths[:] = 1
    second = planner.plan(batch)
    assert isinstance(second, FlashDecodePlan)
    assert second.decode(kind).__self__ is wrapper  # type: ignore[attr-defined]
    assert [x.data_ptr() for x in (wrapper.ends, wrapper.pages, wrapper.lasts, wrapper.lists)] == places
    assert not torch.equal(held, wrapper.lasts)
    assert set(wrapper.lasts.tolist()) == {1}


def test_wrappers_are_not_made_without_end(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_decode, "_MOST", 1)
    case = plain()
    batch: AttentionBatch = case.make()[-1]
    planner = FlashPlanner(ReferenceDevice().upload, torch.device("cpu"), "fa2")
    planner.decodes.take(Kind.of(case.instance))
    one = AttentionBatch(
        batch.query_start[:2], batch.sequence_lengths[:1], tuple(table[:1] for table in batch.page_tables),
        tuple(slots[:1] for slots in batch.slot_mapping), batch.page_tokens, 1, 1,
    )  # fmt: skip
    assert isinstance(planner.plan(batch), FlashDecodePlan)
    assert not isinstance(planner.plan(one), FlashDecodePlan)
    assert isinstance(planner.plan(batch), FlashDecodePlan)


def test_a_trial_leaves_no_buffers_behind(installed: SimpleNamespace) -> None:
    """They would be too small for a step of as many rows."""
    ours = provider()
    with torch.inference_mode():
        ours.build(plain().instance)
    assert not ours._flash_planner.decodes._wrappers


def test_what_is_told_of_decodes(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = plain().instance
    assert "decodes by the faster of both" in provider().supports(instance).reason
    assert "measure=true" in provider("").supports(instance).reason
    monkeypatch.setattr(flash_infer, "why_not", lambda kind, compile: "its kernel is not compiled yet")
    answer = provider().supports(instance)
    assert answer
    assert "decodes by Triton's (its kernel is not compiled yet)" in answer.reason


def test_rows_that_share_pages_are_taken_back(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer would read the pages once for each; in the graph without sharing the step is FlashInfer's still."""
    monkeypatch.setattr(plan, "WORTH", 0)
    ours, case = provider(), _case(torch.float16, "shared", SharedRows(((3, (1, 6, 2)), (0, (9,))), extra=2))
    with torch.inference_mode():
        ours.build(case.instance)
        before = DecodeWrapper.ran
        found, wanted = run(ours, case), run(REFERENCE, case)
        assert DecodeWrapper.ran == before
        torch.testing.assert_close(found[0][:4], wanted[0][:4], atol=4e-3, rtol=4e-3)
        *tensors, state, batch = case.make()
        made = ours.planner().plan(batch)
        assert isinstance(made, FlashDecodePlan)
        assert made.sharing
        ours.build(case.instance)(*tensors, state, replace(made, sharing=()))
    assert DecodeWrapper.ran > before
