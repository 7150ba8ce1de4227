"""Launches are shaped by what a program may have: what fits in 227 KiB is cut smaller for 64, and computes the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hardpoint_rocm.architectures import ARCHITECTURES
from hardpoint_torch_gpu.attention import TritonAttention
from hardpoint_torch_gpu.dense import TorchLinear
from hardpoint_torch_gpu.kernels import paged_decode, paged_prefill, quant_gemm, skinny
from hardpoint_torch_gpu.kernels.paged_prefill import Shape
from hardpoint_torch_gpu.limits import ELSEWHERE, Limits, limits_for, limits_of
from hardpoint_torch_gpu.plan import TILE, GpuPlanner

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

BRAIN, FLOAT = torch.bfloat16, torch.float32
AMD = {chip.name: limits_for("hip", chip.name, chip.wave, chip.lds_bytes) for chip in ARCHITECTURES.values()}
REFERENCE = next(provider for provider in reference_providers() if provider.op == "attention")


def test_a_host_counts_as_the_gpu_that_kernels_were_tuned_on() -> None:
    assert limits_of(torch.device("cpu")) is ELSEWHERE
    assert limits_for("cuda", "90", 32, 232448) == ELSEWHERE


def test_the_last_step_waits_in_registers_where_nothing_copies_past_them() -> None:
    assert (AMD["gfx942"].spare, AMD["gfx950"].spare, AMD["gfx1100"].spare) == (1, 0, 1)
    assert [AMD["gfx942"].held(stages, 1000) for stages in (1, 2, 3)] == [1000, 1000, 2000]


@pytest.mark.parametrize(("step", "stages"), [(1000, 4), (20480, 4), (32768, 2), (40000, 2), (65536, 1), (1 << 20, 1)])
def test_as_many_stages_as_fit(step: int, stages: int) -> None:
    limits = AMD["gfx942"]
    assert limits.stages(4, step) == stages
    assert stages == 1 or limits.held(stages, step) <= limits.shared_bytes


@pytest.mark.parametrize(
    ("width", "dtype", "shape"),
    [(128, BRAIN, Shape(128, 64, 8, 2)), (256, BRAIN, Shape(128, 32, 8, 2)), (256, FLOAT, Shape(32, 16, 4, 2))],
)
def test_an_h200_keeps_its_shapes(width: int, dtype: torch.dtype, shape: Shape) -> None:
    assert paged_prefill.shape_for(ELSEWHERE, width, width, dtype) == shape
    assert paged_decode.shape_for(ELSEWHERE, True, 16, 2 * width, BRAIN) == (64, 4, 2)
    assert paged_decode.shape_for(ELSEWHERE, False, 16, 2 * width, dtype) == (32, 2, 2)
    assert skinny._shape(4096, 16, ELSEWHERE) == (64, 4, 4)
    assert skinny._shape(32768, 64, ELSEWHERE) == (128, 8, 4)


@pytest.mark.parametrize(("chip", "width", "dtype"), product(AMD, (16, 64, 128, 256), (BRAIN, FLOAT)))
def test_every_shape_fits(chip: str, width: int, dtype: torch.dtype) -> None:
    limits, size = AMD[chip], dtype.itemsize
    shape = paged_prefill.shape_for(limits, width, width, dtype)
    assert TILE % shape.queries == 0
    assert shape.queries * width * size <= limits.shared_bytes
    assert limits.held(shape.stages, shape.block * 2 * width * size) <= limits.shared_bytes
    for few in (True, False):
        block, _, stages = paged_decode.shape_for(limits, few, 16, 2 * width, dtype)
        assert limits.held(stages, block * 2 * width * size) + 16 * block * size <= limits.shared_bytes


def test_scarce_registers_make_short_steps() -> None:
    """Where a matrix instruction wants its operand twice."""
    assert paged_prefill.shape_for(AMD["gfx1100"], 128, 128, BRAIN) == Shape(64, 16, 4, 2)
    assert paged_prefill.shape_for(AMD["gfx942"], 128, 128, BRAIN) == Shape(128, 64, 8, 2)
    assert not Limits(65536, 32, 1, 4096).eases(4097)
    assert Limits(65536).eases(1 << 30)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the conformance kit runs these")
@pytest.mark.parametrize("name", ["prefill before decode", "mixed with padding", "sinks and window"])
def test_small_tiles_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CONTRACTS["attention"].samples(FLOAT) if case.instance.where == name)
    monkeypatch.setattr(paged_prefill, "shape_for", lambda *given: Shape(16, 16, 4, 1))
    monkeypatch.setattr(paged_decode, "shape_for", lambda *given: (16, 2, 1))
    provider = TritonAttention(GpuPlanner(ReferenceDevice().upload))
    with torch.inference_mode():
        (found, _), (wanted, _) = run(provider, case), run(REFERENCE, case)
    tolerance = CONTRACTS["attention"].tolerance[FLOAT]
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the conformance kit runs these")
@pytest.mark.parametrize("name", ["q4_0", "gptq4", "q6_k"])
def test_short_steps_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CONTRACTS["linear"].samples(torch.float16) if case.instance.where == name)
    asked: list[torch.device] = []
    scarce = replace(AMD["gfx1100"], operand_bytes=1)
    monkeypatch.setattr(quant_gemm, "limits_of", lambda device: asked.append(device) or scarce)
    reference = next(provider for provider in reference_providers() if provider.op == "linear")
    with torch.inference_mode():
        found, wanted = run(TorchLinear(), case), run(reference, case)
    assert asked
    tolerance = CONTRACTS["linear"].tolerance[torch.float16]
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


def test_columns_of_a_step() -> None:
    assert [AMD["gfx1100"].columns(64, wanted, 2) for wanted in (128, 64, 32, 16)] == [32, 32, 32, 16]
    assert AMD["gfx1100"].columns(128, 128, 2) == 32
    assert AMD["gfx942"].columns(128, 128, 2) == ELSEWHERE.columns(128, 128, 2) == 128
