"""Products of 8-bit numbers by AITER: many rows go there as it wants them, few are Triton's, and all are right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import aiter_stand_in
import pytest
import torch
from hardpoint_rocm.aiter_library import ATTENTION, BLOCKS, PASSED, ROWS, Aiter, AiterFunction
from hardpoint_rocm.aiter_products import LEAST_ROWS, AiterGatedMlp, AiterLinear
from hardpoint_rocm.fnuz import AsFnuz
from hardpoint_torch_gpu.dense import TorchLinear
from hardpoint_torch_gpu.gated_mlp import EightBitMlp
from hardpoint_torch_gpu.pointwise import TritonAddNorm
from hardpoint_torch_gpu.rounded_input import NormBlock

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample, Weight
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run, sample
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, Rounding
from hardpoint_platforms.reference.blocks import build_gated_mlp
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's part runs in the interpreter here"),
]

REFERENCE = next(provider for provider in reference_providers() if provider.op == "linear")
HALF = torch.float16
F8, F8Z = torch.float8_e4m3fn, torch.float8_e4m3fnuz
KINDS = {"fp8": ROWS, "fp8_block": BLOCKS, "int8": ROWS}


@pytest.fixture(autouse=True)
def quiet() -> None:
    aiter_stand_in.CALLS.clear()


def library(**against: str) -> Aiter:
    functions = {name: AiterFunction(name, getattr(aiter_stand_in, name), against.get(name, "")) for name in PASSED}
    return Aiter(True, "", functions)


def linear(*, fnuz: bool = False, **against: str) -> AiterLinear:
    return AiterLinear(AsFnuz(TorchLinear()) if fnuz else TorchLinear(), library(**against))


def linear_case(
    scheme: str | QuantScheme, tokens: Sequence[int] = (LEAST_ROWS,), shape: tuple[int, int] = (256, 256),
    dtype: torch.dtype = HALF, bias: bool = False,
) -> Sample:  # fmt: skip
    weights: dict[str, Weight] = {
        "weight": quantized(Source(3), shape, SCHEMES[scheme] if isinstance(scheme, str) else scheme)
    }
    if bias:
        weights["bias"] = Source(4).normal(shape[0], dtype=dtype)
    rows, columns = shape

    def make(source: Source) -> tuple[torch.Tensor, ...]:
        return (source.normal(*tokens, columns, dtype=dtype),)

    return sample(
        CONTRACTS["linear"], str(scheme), dtype, make, weights, in_features=columns, out_features=rows, bias=bias
    )


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("scheme", KINDS)
def test_many_rows_agree_with_the_reference(scheme: str, fnuz: bool) -> None:
    ours, case = linear(fnuz=fnuz), linear_case(scheme, (3, 50))
    answer = ours.supports(case.instance)
    assert answer.reason.endswith(f"; 129 rows and more by AITER's {KINDS[scheme]}")
    tolerance = CONTRACTS["linear"].tolerance[HALF]
    with torch.inference_mode():
        found, wanted = run(ours, case), run(REFERENCE, case)
    assert [KINDS[scheme]] == aiter_stand_in.CALLS
    assert found.dtype is HALF
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block"])
def test_weights_are_held_as_the_chip_multiplies_them(scheme: str) -> None:
    case = linear_case(scheme)
    for fnuz, kind, factor in ((False, F8, 1.0), (True, F8Z, 4.0)):
        packed = linear(fnuz=fnuz).pack(case.instance, case.weights)
        assert packed[0].dtype is kind
        assert packed[-1].is_contiguous()
        assert packed[-1].dtype is torch.float32
        assert torch.equal(packed[-1], case.weights["weight"].scales.float() * factor)


def test_scales_that_are_the_same_memory_count_once() -> None:
    whole, blocks = linear_case("fp8"), linear_case("fp8_block")
    for case, more in ((whole, 0), (blocks, 4 * 4)):
        ours, theirs = linear(), TorchLinear()
        held = ours.packed_bytes(ours.pack(case.instance, case.weights))
        without = theirs.packed_bytes(theirs.pack(case.instance, case.weights))
        assert sum(held.values()) == sum(without.values()) + more


def test_few_rows_are_tritons() -> None:
    ours, case = linear(), linear_case("fp8", (2, 2))
    with torch.inference_mode():
        found, wanted = run(ours, case), run(REFERENCE, case)
    assert aiter_stand_in.CALLS == []
    tolerance = CONTRACTS["linear"].tolerance[HALF]
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


def test_the_first_number_of_rows_that_is_many() -> None:
    ours = linear()
    for rows, calls in ((LEAST_ROWS - 1, []), (LEAST_ROWS, [ROWS])):
        case = linear_case("int8", (rows,), (16, 256))
        with torch.inference_mode():
            run(ours, case)
        assert calls == aiter_stand_in.CALLS


def scheme(group: int, rows: int, x_group: int, packing: Packing = Packing.FLOAT8) -> QuantScheme:
    codes = Codes.FLOAT8 if packing is Packing.FLOAT8 else Codes.INT8
    return QuantScheme("own", packing, 8, group, group_rows=rows, rounding=Rounding(codes, x_group))


ONE_SCALE = "weight: AITER has one scale per row, or one per 128 by 128 block of 8-bit floats"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (linear_case("q8_0"), "weight is no product of 8-bit numbers"),
        (linear_case("fp8", dtype=torch.float32), "torch.float32 sums, AITER writes 16-bit ones"),
        (linear_case("fp8", bias=True), "a bias, which AITER's products of floats do not add"),
        (linear_case("fp8", shape=(24, 256)), "weight is 24 by 256, AITER's gemm_a8w8_CK takes multiples of 16"),
        (
            linear_case("fp8_block", shape=(192, 256)),
            "weight is 192 by 256, AITER's gemm_a8w8_blockscale takes multiples of 128",
        ),
        (linear_case(scheme(128, 1, 128)), ONE_SCALE),
        (linear_case(scheme(64, 64, 64)), ONE_SCALE),
        (linear_case(scheme(128, 128, 0)), ONE_SCALE),
        (linear_case(scheme(256, 128, 0)), ONE_SCALE),
        (linear_case(scheme(128, 128, 128, Packing.INT8)), ONE_SCALE),
    ],
)
def test_what_it_does_not_take(case: Sample, why: str) -> None:
    answer = linear().supports(case.instance)
    assert (bool(answer), answer.reason) == (False, why)


def test_what_the_library_is_refused_for_is_passed_on() -> None:
    ours = linear(**{BLOCKS: "AITER's gemm_a8w8_blockscale is wrong by 0.3 of the largest number"})
    assert ours.supports(linear_case("fp8").instance)
    answer = ours.supports(linear_case("fp8_block").instance)
    assert (bool(answer), answer.reason) == (False, library(**{BLOCKS: answer.reason}).functions[BLOCKS].against)
    assert answer.reason.startswith("AITER's gemm_a8w8_blockscale is wrong")
    assert library().functions[ATTENTION].against == ""


def mlp(*, fnuz: bool = False, **against: str) -> AiterGatedMlp:
    return AiterGatedMlp(AsFnuz(EightBitMlp()) if fnuz else EightBitMlp(), library(**against))


def mlp_case(up: str, down: str, tokens: int = LEAST_ROWS, **attrs: Any) -> Sample:
    weights: dict[str, Weight] = {
        "gate_up": quantized(Source(6), (512, 256), SCHEMES[up]),
        "down": quantized(Source(7), (256, 256), SCHEMES[down]),
    }

    def make(tokens: int, source: Source) -> tuple[torch.Tensor, ...]:
        return (source.normal(tokens, 256, dtype=HALF),)

    return sample(
        CONTRACTS["gated_mlp"], up, HALF, partial(make, tokens), weights, hidden=256, intermediate=256, kind="silu",
        **attrs,
    )  # fmt: skip


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize(("up", "down"), [("fp8", "fp8"), ("fp8_block", "fp8_block"), ("fp8", "fp8_block")])
def test_a_gated_mlp_agrees_with_the_reference(up: str, down: str, fnuz: bool) -> None:
    """Inputs are rounded to 3 bits there and not in the plain one."""
    ours, case = mlp(fnuz=fnuz), mlp_case(up, down)
    assert ours.supports(case.instance)
    with torch.inference_mode():
        found = run(ours, case)
        plain = [weight.dequantize() for weight in case.weights.values()]
        wanted = build_gated_mlp(case.instance)(case.make()[0].float(), plain)
    assert [KINDS[up], KINDS[down]] == aiter_stand_in.CALLS
    assert found.dtype is HALF
    assert (found - wanted).norm() < 0.06 * wanted.norm()
    aiter_stand_in.CALLS.clear()
    few = mlp_case(up, down, 4)
    with torch.inference_mode():
        torch.testing.assert_close(run(ours, few), run(EightBitMlp(), few), atol=2e-3, rtol=2e-2)
    assert aiter_stand_in.CALLS == []


def test_a_gated_mlp_needs_both_products() -> None:
    why = "AITER here has no gemm_a8w8_blockscale"
    ours = mlp(**{BLOCKS: why})
    assert ours.supports(mlp_case("fp8", "int8").instance)
    answer = ours.supports(mlp_case("fp8", "fp8_block").instance)
    assert (bool(answer), answer.reason) == (False, why)
    assert "gemm_a8w8_CK and gemm_a8w8_blockscale" in mlp().supports(mlp_case("fp8", "fp8_block").instance).reason


def test_a_gated_mlp_that_is_no_block_here_is_none_there() -> None:
    answer = mlp().supports(mlp_case("fp8", "q8_0").instance)
    assert (bool(answer), answer.reason) == (False, "down is no product of 8-bit numbers")


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8"])
def test_a_norm_hands_its_numbers_to_either(scheme: str, fnuz: bool) -> None:
    """To AITER's product where rows are many, to Triton's where they are few: as the norm alone and a product."""
    rows = {"in_features": 256, "out_features": 256}
    weights: dict[str, Weight] = {
        "norm_weight": Source(5).normal(256) + 1.0,
        "weight": quantized(Source(6), (256, 256), SCHEMES[scheme]),
    }
    product = AiterLinear(AsFnuz(TorchLinear()) if fnuz else TorchLinear(), library())
    ours, alone = NormBlock(product), {"weight": weights["weight"]}
    for tokens, calls in ((LEAST_ROWS, [KINDS[scheme]]), (4, [])):

        def make(count: int, tokens: int, source: Source) -> tuple[torch.Tensor, ...]:
            return tuple(source.normal(tokens, 256, dtype=HALF) for _ in range(count))

        case = sample(
            CONTRACTS["norm_linear"], "both", HALF, partial(make, 2, tokens), weights, norm_kind="rms", **rows
        )
        assert ours.supports(case.instance)
        assert "by AITER's" in ours.supports(case.instance).reason
        aiter_stand_in.CALLS.clear()
        with torch.inference_mode():
            y, total = run(ours, case)
        assert calls == aiter_stand_in.CALLS
        x, residual = case.make()
        norm = CONTRACTS["add_norm"].instance("n", HALF, {"weight": case.instance.weights["norm_weight"]}, kind="rms")
        normed, summed = TritonAddNorm().build(norm)(x, residual, (weights["norm_weight"],))
        apart = sample(CONTRACTS["linear"], "apart", HALF, lambda _, n=normed: (n,), alone, **rows)
        with torch.inference_mode():
            assert torch.equal(y, run(product, apart))
        assert torch.equal(total, summed)


def test_a_norm_is_not_claimed_where_the_library_does_not_fit() -> None:
    ours = NormBlock(AiterLinear(TorchLinear(), library()))
    case = next(one for one in CONTRACTS["norm_linear"].samples(torch.float32) if one.instance.where == "fp8")
    assert "16-bit ones" in ours.supports(case.instance).reason
