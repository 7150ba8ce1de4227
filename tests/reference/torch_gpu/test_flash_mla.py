"""Latent attention by libraries: what they are told is right, by stand-ins that compute from just that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hardpoint_cuda import flash_mla, flash_plans
from hardpoint_cuda.flash_mla import (
    FlashInferMla,
    FlashMla,
    FlashMlaDecode,
    FlashMlaPlan,
    FlashMlaPlanner,
    LatentCache,
    _with_rope,
    flash_prompts,
    has_flash_mla,
    joined,
    mla_providers,
)
from hardpoint_torch_gpu.latent_plan import LatentPlan
from hardpoint_torch_gpu.mla import _absorbed, mla_prefill
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner

from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import PagedRows, run
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, LayerCache

pytestmark = pytest.mark.reference

CONTRACT = CONTRACTS["mla_attention"]
REFERENCE = next(provider for provider in reference_providers() if provider.op == "mla_attention")
SAMPLES = tuple(case for case in CONTRACT.samples(torch.float16) if case.instance.attrs["latent_dim"] == 32)
UPLOAD = ReferenceDevice().upload


def attended(q: torch.Tensor, rows: torch.Tensor, before: int, scale: float, values: int) -> torch.Tensor:
    """q [n, h, c + dr] over the first tokens of rows [tokens, c + dr], n of them new: [n, h, values]."""
    score = torch.einsum("qhd,kd->hqk", q.float(), rows.float()) * scale
    seen = torch.arange(len(rows))[None, :] <= before + torch.arange(len(q))[:, None]
    return torch.einsum("hqk,kd->qhd", score.masked_fill(~seen, float("-inf")).softmax(-1), rows[:, :values].float())


class Wrapper:
    """FlashInfer's: attends what `plan` was told, one row at a time."""

    made = 0

    def __init__(self, space: torch.Tensor, *, backend: str) -> None:
        assert backend == "fa2"

    def plan(self, *, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
             kv_len_arr: torch.Tensor, causal: bool, sm_scale: float, **shape: Any) -> None:  # fmt: skip
        assert causal
        assert all(array.dtype == torch.int32 for array in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        assert int(kv_indptr[-1]) == len(kv_indices)
        assert (shape["head_dim_ckv"], shape["head_dim_kpe"]) == (32, 8)
        type(self).made += 1
        self.rows = [
            (slice(*qo_indptr[r : r + 2].tolist()), kv_indices[slice(*kv_indptr[r : r + 2].tolist())].long(), length)
            for r, length in enumerate(kv_len_arr.tolist())
        ]
        self.heads, self.scale = shape["num_heads"], sm_scale

    def run(self, *, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor,
            out: torch.Tensor) -> torch.Tensor:  # fmt: skip
        assert q_nope.shape[1] == q_pe.shape[1] == self.heads
        for part, pages, length in self.rows:
            rows = torch.cat((ckv_cache[pages].flatten(0, 1), kpe_cache[pages].flatten(0, 1)), -1)[:length]
            q = torch.cat((q_nope[part], q_pe[part]), -1)
            out[part] = attended(q, rows, length - len(q), self.scale, q_nope.shape[-1]).to(out.dtype)
        return out


def flash_mla_with_kvcache(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, values: int, schedule: object,
    splits: object, *, softmax_scale: float, causal: bool,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """DeepSeek's: one query per row."""
    assert schedule == ("planned", len(lengths))
    assert splits is None
    assert not causal
    rows = [
        attended(q[r], cache[table[r].long(), :, 0].flatten(0, 1)[:length], length - 1, softmax_scale, values)
        for r, length in enumerate(lengths.tolist())
    ]
    return torch.stack(rows).to(q.dtype), None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for both packages; `on_disk` says whether FlashInfer's kernels are compiled."""
    state = SimpleNamespace(on_disk=True, decodes=0, schedules=0, capturing=False)

    def scheduled(lengths: torch.Tensor, queries: int, heads: int) -> tuple[object, None]:
        state.schedules += 1
        return ("planned", len(lengths)), None

    def counted(*args: Any, **named: Any) -> Any:
        state.decodes += 1
        return flash_mla_with_kvcache(*args, **named)

    modules: dict[str, dict[str, Callable[..., Any]]] = {
        "flashinfer": {},
        "flashinfer.jit": {
            "gen_batch_mla_module": lambda *kind: SimpleNamespace(is_compiled=state.on_disk, is_aot=False)
        },
        "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": Wrapper},
        "flash_mla": {
            "flash_mla_with_kvcache": counted,
            "get_mla_metadata": scheduled,
        },
    }
    for name, parts in modules.items():
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash_mla, "_WIDTHS", (32, 8))
    monkeypatch.setattr(flash_mla, "_WORKSPACE", 16)
    monkeypatch.setattr(flash_mla, "_PAGE", 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None))
    return state


def by_flash_infer(*, compile: bool = False) -> FlashInferMla:
    return FlashInferMla(FlashMlaPlanner(UPLOAD, torch.device("cpu"), "fa2"), "fa2", compile=compile)


def side_by_side(case: Sample) -> Sample:
    """The same with the cache that `LatentCache` would make."""

    def make() -> tuple[Any, ...]:
        *given, ((latents, keys),), batch = case.make()
        whole = torch.cat((latents, keys), -1)
        return *given, (tuple(whole.split((latents.shape[-1], keys.shape[-1]), -1)),), batch

    return replace(case, make=make)


def agree(provider: Any, case: Sample) -> None:
    with torch.inference_mode():
        (ours, state), (theirs, wanted) = run(provider, case), run(REFERENCE, case)
    close = CONTRACT.tolerance[torch.float16]
    torch.testing.assert_close(ours, theirs, atol=close.atol, rtol=close.rtol)
    for part, expected in zip(state[0], wanted[0], strict=True):
        assert torch.equal(part[1:], expected[1:])


@pytest.mark.parametrize("case", SAMPLES, ids=[case.instance.where for case in SAMPLES])
def test_prompts_by_flash_infer(installed: SimpleNamespace, case: Sample) -> None:
    answer = ask(CONTRACT, by_flash_infer(), case.instance)
    assert answer, answer.reason
    before = Wrapper.made
    agree(by_flash_infer(), case)
    assert (Wrapper.made > before) == (case.instance.where in ("mixed with padding", "one head")), (
        "prompts that continue"
    )


@pytest.mark.parametrize("case", SAMPLES, ids=[case.instance.where for case in SAMPLES])
def test_decodes_by_flash_mla(installed: SimpleNamespace, case: Sample) -> None:
    provider = FlashMla(GpuPlanner(UPLOAD), mla_prefill, None)
    agree(provider, side_by_side(case))
    assert installed.decodes == (case.instance.where == "decode")
    agree(provider, case)
    assert installed.decodes == (case.instance.where == "decode"), "two tensors are not what it takes"


def test_layers_of_a_step_are_scheduled_once(installed: SimpleNamespace) -> None:
    """And a recording makes a schedule of its own: one from before it would be that of other lengths at each replay."""
    decode, (case,) = FlashMlaDecode(), [case for case in SAMPLES if case.instance.where == "decode"]
    q_nope, q_rope, latent, k_rope, ((latents, keys),), batch = side_by_side(case).make()
    plan = GpuPlanner(UPLOAD).plan(batch)
    absorbed = torch.randn((q_nope.shape[1], len(q_nope), latent.shape[-1]), dtype=q_nope.dtype)

    def layer() -> None:
        decode(absorbed, q_rope, (latent, k_rope), latents, keys, plan, 0, 0.1, torch.empty_like(absorbed))

    layer()
    layer()
    assert (installed.decodes, installed.schedules) == (2, 1)
    installed.capturing = True
    layer()
    layer()
    assert installed.schedules == 2
    plan = GpuPlanner(UPLOAD).plan(batch)
    layer()
    assert installed.schedules == 3


def test_rotated_queries_go_behind_the_others() -> None:
    q, expand, rope = torch.randn(5, 3, 6), torch.randn(3, 6, 16), torch.randn(5, 3, 4)
    absorbed = _absorbed(q, expand, 4)
    whole = _with_rope(absorbed, rope)
    assert whole.data_ptr() == absorbed.data_ptr(), "copied"
    assert torch.equal(whole, torch.cat((absorbed.transpose(0, 1), rope), -1))
    assert torch.equal(_with_rope(absorbed.contiguous(), rope), whole)
    torch.testing.assert_close(absorbed, torch.bmm(q.transpose(0, 1), expand))


def test_both_together(installed: SimpleNamespace) -> None:
    beside = by_flash_infer()
    planner = beside.planner()
    assert isinstance(planner, FlashMlaPlanner)
    provider = FlashMla(planner, flash_prompts, beside)
    before = Wrapper.made
    for case in SAMPLES:
        agree(provider, side_by_side(case))
    assert installed.decodes
    assert Wrapper.made > before
    installed.on_disk = False
    assert "flashinfer=compile" in provider.supports(SAMPLES[0].instance).reason


def test_what_is_offered(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "missing", lambda: "")
    monkeypatch.setattr(flash_mla.importlib.util, "find_spec", lambda name: object())

    def names(capability: tuple[int, int], wanted: str) -> list[str]:
        return [each.name for each in mla_providers(UPLOAD, torch.device("cpu"), capability, wanted)]

    ours, theirs = "flashinfer + triton mla", "flashmla + triton mla"
    assert names((9, 0), "auto") == ["flashmla + flashinfer mla", ours, theirs]
    assert names((8, 0), "auto") == [ours]
    assert names((9, 0), "off") == [theirs]
    monkeypatch.setattr(flash_mla, "missing", lambda: "not installed")
    assert names((8, 0), "auto") == []
    monkeypatch.setattr(flash_mla.importlib.util, "find_spec", lambda name: None)
    assert not has_flash_mla((9, 0))


def test_what_they_do_not_have_is_refused(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SAMPLES[0].instance
    assert "float32" in by_flash_infer().supports(replace(plain, dtype=torch.float32)).reason
    assert "256" in by_flash_infer().supports(replace(plain, attrs={**plain.attrs, "latent_dim": 256})).reason
    installed.on_disk = False
    monkeypatch.setattr(flash_plans.shutil, "which", lambda name: None)
    assert "no nvcc" in by_flash_infer(compile=True).supports(plain).reason
    monkeypatch.setattr(flash_plans.shutil, "which", lambda name: "/usr/bin/nvcc")
    assert by_flash_infer(compile=True).supports(plain)


def test_rows_that_do_not_lie_together_are_left_to_the_other_kernel() -> None:
    planner = FlashMlaPlanner(UPLOAD, torch.device("cpu"), "fa2")

    def plan(*rows: tuple[int, int]) -> GpuPlan:
        return planner.plan(PagedRows(rows, 4).batch())

    assert isinstance(plan((3, 1), (0, 1), (2, 5), (4, 7)), FlashMlaPlan)
    assert not isinstance(plan((2, 5), (9, 1), (4, 7)), FlashMlaPlan)
    assert not isinstance(plan((3, 1), (0, 1)), FlashMlaPlan)
    mixed = plan((2, 5), (0, 7))
    assert isinstance(mixed, LatentPlan)
    assert isinstance(mixed.rest, FlashMlaPlan)
    assert (mixed.rest.first, mixed.rest.last) == (0, 5)
    apart = plan((2, 5), (0, 7), (3, 2))
    assert isinstance(apart, LatentPlan)
    assert not isinstance(apart.rest, FlashMlaPlan)


def test_the_cache_lays_latent_and_rope_key_side_by_side() -> None:
    layers = (LayerCache((("latent", 1, 32), ("rope_key", 1, 8))), LayerCache((("k", 2, 16), ("v", 2, 16))))
    layout = CacheLayout((CacheGroup((0, 1)),), layers, 4, torch.float16)
    ours = LatentCache(ReferenceDevice())
    state = ours.allocate(layout, 5)
    assert [[tuple(part.shape) for part in parts] for parts in state] == [
        [(5, 4, 1, 32), (5, 4, 1, 8)],
        [(5, 4, 2, 16), (5, 4, 2, 16)],
    ]
    whole = joined(*state[0])
    assert whole is not None
    state[0][1][2] = 3.0
    assert (whole[2, ..., 32:] == 3.0).all()
    assert not whole[..., :32].any()
    assert joined(*state[1]) is None
    state = ours.copy_pages(state, [2], [4])
    assert (state[0][1][4] == 3.0).all()
    sent = ours.export_pages(state, layout, [4])
    state = ours.import_pages(state, [1], sent)
    assert (state[0][1][1] == 3.0).all()
    assert not state[0][0].any()
