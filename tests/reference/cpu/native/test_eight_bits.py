"""Schemes of 8-bit floats, of blocks of scales and of rounded inputs: what the library takes, and what it leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint_cpu.native.dense import NativeEmbedding, NativeLinear, NativeLogits
from hardpoint_cpu.native.moe import NativeExperts
from hardpoint_cpu.native.provider import Setting
from hardpoint_cpu.native.stage import Stage
from hardpoint_cpu.ops.dense import CpuEmbedding, CpuLinear
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance, Sample
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run, sample, specs
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, Rounding
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

REFERENCE = {provider.op: provider for provider in reference_providers()}
PLAIN = {name: replace(SCHEMES[name], rounding=None) for name in ("fp8", "fp8_block", "int8")}
BLOCKS = replace(SCHEMES["q8_0"], name="int8 blocks", group_rows=16)


def linear(scheme: QuantScheme, rows: int = 40) -> Sample:
    """Three tokens through a weight whose rows end inside a block."""
    weight = quantized(Source(3), (rows, 256), scheme)
    attrs: dict[str, Any] = {"in_features": 256, "out_features": rows}
    return sample(
        CONTRACTS["linear"], "here", torch.float32, lambda s: (s.normal(3, 256),), {"weight": weight}, **attrs
    )


def experts(scheme: QuantScheme, interleaved: bool = False) -> Sample:
    """Five tokens, each through two of three experts."""
    weights = {
        "gate_up": quantized(Source(3), (3, 2 * 256, 256), scheme),
        "down": quantized(Source(4), (3, 256, 256), scheme),
    }

    def make(s: Source) -> tuple[Any, ...]:
        return s.normal(5, 256), s.uniform(5, 2), s.integers(0, 3, 5, 2)

    sizes = {"experts": 3, "top_k": 2, "hidden": 256, "intermediate": 256}
    return sample(
        CONTRACTS["experts"], "here", torch.float32, make, weights, activation="silu", interleaved=interleaved, **sizes
    )


def distance(provider: OpProvider, case: Sample) -> float:
    """From the reference, relative to its length."""
    wanted = run(REFERENCE[case.instance.op], case)
    return float((run(provider, case) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scheme", [*PLAIN.values(), BLOCKS], ids=lambda scheme: scheme.name)
def test_weights_alone(scheme: QuantScheme, stage: Stage) -> None:
    kept = scheme.packing is Packing.INT8
    for exact in (False, True):
        for case, provider in (
            (linear(scheme), NativeLinear(Setting(stage, exact))),
            (experts(scheme), NativeExperts(Setting(stage, exact))),
            (experts(scheme, interleaved=True), NativeExperts(Setting(stage, exact))),
        ):
            answer = provider.supports(case.instance)
            assert answer
            assert ("rounded to int8" in answer.reason) == (kept and not exact)
            assert ("dequantized at load" in answer.reason) == (exact or not kept)
            assert distance(provider, case) < (0.02 if kept and not exact else 2e-6)


def test_int8_inputs_are_taken_in_fast_mode_alone(stage: Stage) -> None:
    for case, kind in ((linear(SCHEMES["int8"]), NativeLinear), (experts(SCHEMES["int8"]), NativeExperts)):
        fast, exact = kind(Setting(stage)), kind(Setting(stage, exact=True))
        answer = fast.supports(case.instance)
        assert answer
        assert "loses less than per token" in answer.reason
        assert not exact.supports(case.instance)
        assert "exact" in exact.supports(case.instance).reason


@pytest.mark.parametrize(("make", "kind"), [(linear, NativeLinear), (experts, NativeExperts)])
def test_blocks_of_16_do_lose_less_than_a_scale_per_token(make: Any, kind: Any, stage: Stage) -> None:
    """Measured against inputs that are not rounded at all."""
    case, plain = make(SCHEMES["int8"]), make(PLAIN["int8"])
    wanted = run(REFERENCE[case.instance.op], plain)
    ours, theirs = run(kind(Setting(stage)), case), run(REFERENCE[case.instance.op], case)
    assert (ours - wanted).norm() < (theirs - wanted).norm() * 0.8
    assert (ours - wanted).norm() < wanted.norm() * 0.015


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "scheme",
    [
        SCHEMES["fp8"],
        SCHEMES["fp8_block"],
        replace(PLAIN["int8"], rounding=Rounding(Codes.FLOAT8)),
        replace(PLAIN["int8"], rounding=Rounding(Codes.INT8, 8)),
    ],
    ids=str,
)
def test_other_roundings_are_left_to_torch(scheme: QuantScheme, exact: bool, stage: Stage) -> None:
    for case, kind in ((linear(scheme), NativeLinear), (experts(scheme), NativeExperts)):
        answer = kind(Setting(stage, exact)).supports(case.instance)
        assert not answer
        assert scheme.name in answer.reason
    mine = CpuLinear(blocked=True)
    assert "rounded to 8 bits" in mine.supports(linear(scheme).instance).reason
    assert distance(mine, linear(scheme)) == 0.0


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8"])
def test_ops_that_need_not_round_take_them(name: str, exact: bool, stage: Stage) -> None:
    table = quantized(Source(3), (40, 256), SCHEMES[name])
    logits: OpInstance = CONTRACTS["logits"].instance("here", torch.float32, specs({"weight": table}, torch.float32))
    provider = NativeLogits(Setting(stage, exact))
    assert provider.supports(logits)
    x = Source(1).normal(3, 256)
    found = provider.build(logits)(x, provider.pack(logits, {"weight": table}))
    wanted = x @ table.dequantize().T
    assert (found - wanted).norm() / wanted.norm() < 0.02
    rows = CONTRACTS["embedding"].instance("here", torch.float32, specs({"weight": table}, torch.float32))
    ids = torch.tensor([39, 0, 17])
    for each in (NativeEmbedding(Setting(stage, exact)), CpuEmbedding()):
        assert each.supports(rows)
        assert torch.equal(each.build(rows)(ids, each.pack(rows, {"weight": table})), table.dequantize()[ids])


def test_rows_of_blocks_stay_quantized_in_the_embedding_of_torch() -> None:
    table = quantized(Source(3), (300, 256), SCHEMES["fp8_block"])
    instance = CONTRACTS["embedding"].instance("here", torch.float32, specs({"weight": table}, torch.float32))
    provider, ids = CpuEmbedding(), torch.tensor([0, 127, 128, 255, 256, 299])
    packed = provider.pack(instance, {"weight": table})
    assert sum(part.nbytes for part in packed) == table.nbytes
    assert torch.equal(provider.build(instance)(ids, packed), table.dequantize()[ids])
