"""Prompts by AITER: what it is told of rows and keys is right, by a stand-in that computes from just that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiter_stand_in
import numpy as np
import pytest
import torch
from hardpoint_rocm import aiter_attention
from hardpoint_rocm.aiter_attention import AiterAttention, AiterPlan, AiterPlanner
from hardpoint_rocm.aiter_library import ATTENTION, AiterFunction
from hardpoint_torch_gpu.rotary_attention import RotaryAttention

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.attention import _case, _Shape
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import PagedRows, run
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_blocks, reference_providers

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's part runs in the interpreter here"),
]

CONTRACT = CONTRACTS["attention"]
REFERENCE = next(provider for provider in reference_providers() if provider.op == "attention")
SAMPLES = {case.instance.where: case for case in CONTRACT.samples(torch.float16)}
#: Why some of the contract's samples are Triton's.
REFUSED = {
    "no sharing, odd sizes": "head sizes 20 and 12",
    "window of one": "a sliding window of one token",
    "softcap": "a soft cap",
    "sinks": "a score with a bias by distance or with sinks",
    "sinks and window": "a score with a bias by distance or with sinks",
    "alibi": "a score with a bias by distance or with sinks",
}
#: Rows with one token among those with several: they do not lie together.
APART = ("prefill before decode",)
DECODES = ("decode", "one token", "padding only")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of what is gathered; on a GPU it is larger than a test wants."""
    monkeypatch.setattr(aiter_attention, "_WORKSPACE", 1 << 16)
    aiter_stand_in.CALLS.clear()


def provider(call: Any = aiter_stand_in.flash_attn_varlen_func, against: str = "") -> AiterAttention:
    planner = AiterPlanner(ReferenceDevice().upload, torch.device("cpu"))
    return AiterAttention(planner, AiterFunction(ATTENTION, call, against))


def check(ours: AiterAttention, case: Sample) -> None:
    real, tolerance = case.make()[-1].num_tokens, CONTRACT.tolerance[torch.float16]
    with torch.inference_mode():
        found, wanted = run(ours, case), run(REFERENCE, case)
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[0][:real], wanted[0][:real], atol=tolerance.atol, rtol=tolerance.rtol)
    for ours_now, theirs in zip(found[1][1], wanted[1][1], strict=True):
        assert torch.equal(ours_now[1:], theirs[1:])


@pytest.mark.parametrize("case", SAMPLES.values(), ids=SAMPLES)
def test_agrees_with_the_reference(case: Sample) -> None:
    ours, where = provider(), case.instance.where
    answer = ask(CONTRACT, ours, case.instance)
    if where in REFUSED:
        assert not answer
        assert answer.reason.startswith(REFUSED[where])
        return
    assert answer.reason == "prompts by AITER over gathered pages, decodes by Triton's"
    check(ours, case)
    assert bool(aiter_stand_in.CALLS) is (where not in (*APART, *DECODES))


def test_behind_norms_and_rope_in_one_launch() -> None:
    contract = CONTRACTS["rotary_attention"]
    reference = next(block for block in reference_blocks() if block.op == contract.name)
    case = next(case for case in contract.samples(torch.float16) if case.instance.where.startswith("chunk"))
    ours, tolerance = RotaryAttention(provider()), contract.tolerance[torch.float16]
    assert ask(contract, ours, case.instance).reason.endswith(
        "prompts by AITER over gathered pages, decodes by Triton's"
    )
    with torch.inference_mode():
        found, wanted = run(ours, case), run(reference, case)
    assert aiter_stand_in.CALLS
    torch.testing.assert_close(found[0], wanted[0], atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize(("size", "dtype", "why"), [
    (12, torch.float16, "head size 12, AITER has multiples of 8 up to 256"),
    (16, torch.float32, "torch.float32 products, AITER has 16-bit ones"),
    (80, torch.bfloat16, ""),
    (264, torch.float16, "head size 264, the kernels take up to 256"),
])  # fmt: skip
def test_sizes_and_dtypes(size: int, dtype: torch.dtype, why: str) -> None:
    case = _case(dtype, "prefill", PagedRows(((0, 5),)), _Shape(4, 2, size, size))
    answer = provider().supports(case.instance)
    assert bool(answer) is not bool(why)
    assert not why or answer.reason == why


def test_what_the_library_is_refused_for_is_passed_on() -> None:
    answer = provider(against="AITER is not installed").supports(SAMPLES["prefill"].instance)
    assert (bool(answer), answer.reason) == (False, "AITER is not installed")


def test_a_result_that_lies_elsewhere_is_taken() -> None:
    def elsewhere(**named: Any) -> torch.Tensor:
        return aiter_stand_in.flash_attn_varlen_func(**named | {"out": torch.empty_like(named["out"])})

    check(provider(elsewhere), SAMPLES["mixed with padding"])


def test_a_cache_of_another_dtype_is_tritons() -> None:
    case = SAMPLES["prefill"]

    def wide(make: Any = case.make) -> tuple[Any, ...]:
        q, k, v, state, *others = make()
        return q, k, v, [(keys.float(), values.float()) for keys, values in state], *others

    other = replace(case, make=wide)
    with torch.inference_mode():
        found, wanted = run(provider(), other), run(REFERENCE, other)
    torch.testing.assert_close(found[0], wanted[0], atol=4e-3, rtol=4e-3)
    assert aiter_stand_in.CALLS == []


def test_more_keys_than_there_is_room_for_are_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 keys of two heads of 16 numbers: 896 bytes."""
    for room, calls in ((2 * 895, 0), (2 * 896, 1)):
        monkeypatch.setattr(aiter_attention, "_WORKSPACE", room)
        check(provider(), SAMPLES["prefill"])
        assert len(aiter_stand_in.CALLS) == calls


def batch(*rows: tuple[int, int]) -> AttentionBatch:
    """Rows of (queries, keys), pages of 4 tokens that lie anywhere, two groups."""
    queries, lengths = (np.array(each, np.int32) for each in zip(*rows, strict=True))
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    table = np.random.default_rng(1).permutation(len(rows) * 8).astype(np.int32).reshape(len(rows), 8)
    slots = np.zeros(starts[-1], np.int32)
    return AttentionBatch(starts, lengths, (table, table + 100), (slots, slots), 4, len(rows), int(starts[-1]))


def test_the_keys_of_a_window_alone_are_gathered() -> None:
    given = batch((1, 9), (3, 20), (5, 6))
    plan = AiterPlanner(ReferenceDevice().upload, torch.device("cpu")).plan(given)
    assert isinstance(plan, AiterPlan)
    assert (plan.first, plan.last) == (1, 9)
    whole, windowed = plan.gathering(1, None, 26), plan.gathering(1, 4, 26)
    assert whole is not None
    assert windowed is not None
    assert plan.gathering(1, None, 25) is None
    assert plan.gathering(1, None, 26) is whole
    assert (whole.most_queries, whole.most_keys, windowed.most_keys) == (5, 20, 6)
    assert whole.query_ends.tolist() == windowed.query_ends.tolist() == [0, 3, 8]
    assert (whole.key_ends.tolist(), windowed.key_ends.tolist()) == ([0, 20, 26], [0, 6, 12])
    pages = given.page_tables[1]
    places = [int(pages[row, token // 4] * 4 + token % 4) for row, keys in ((1, 20), (2, 6)) for token in range(keys)]
    assert whole.places.tolist() == places
    assert windowed.places.tolist() == places[14:]
    assert {x.dtype for x in (whole.places, whole.query_ends, whole.key_ends)} == {torch.int32}


def test_steps_without_prompts_and_scattered_ones_have_the_common_plan() -> None:
    planner = AiterPlanner(ReferenceDevice().upload, torch.device("cpu"))
    assert not isinstance(planner.plan(batch((1, 4), (1, 9))), AiterPlan)
    assert not isinstance(planner.plan(batch((2, 4), (1, 9), (3, 3))), AiterPlan)
