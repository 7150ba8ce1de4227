"""Norms that round for the next product: one pass gives what two give, and what the block's contract says."""

from __future__ import annotations

import pytest
import torch
from hardpoint_torch_gpu.dense import TorchLinear
from hardpoint_torch_gpu.gated_mlp import EightBitMlp
from hardpoint_torch_gpu.kernels.norm import LONGEST, norm
from hardpoint_torch_gpu.kernels.norm_round import norm_round
from hardpoint_torch_gpu.kernels.round_input import round_rows
from hardpoint_torch_gpu.pointwise import TritonAddNorm
from hardpoint_torch_gpu.rounded_input import NormBlock

from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance, Sample, Weight, WeightSpec
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run, sample, specs
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, Rounding
from hardpoint_platforms.reference.providers import ReferenceProvider

pytestmark = pytest.mark.reference

AT = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS = {"norm_linear": NormBlock(TorchLinear()), "norm_gated_mlp": NormBlock(EightBitMlp())}
CASES = [case for name in BLOCKS for case in CONTRACTS[name].samples(torch.float32)]


def normal(source: Source, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return source.normal(*shape, dtype=dtype, scale=scale).to(AT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", Codes)
@pytest.mark.parametrize(("columns", "group"), [(192, 0), (200, 0), (192, 64), (384, 128), (4096, 0), (4096, 128)])
@pytest.mark.parametrize(("kind", "weights"), [("rms", 1), ("rms", 0), ("rms1p", 1), ("ln", 2), ("ln", 0), ("l2", 1)])
def test_one_pass_equals_two_to_the_bit(
    kind: str, weights: int, columns: int, group: int, codes: Codes, dtype: torch.dtype
) -> None:
    source, rounding = Source(3), Rounding(codes, group)
    x, residual = (normal(source, 5, columns, dtype=dtype, scale=3.0) for _ in range(2))
    residual[0] = -x[0]  # a row of zeros
    x[1, :64], residual[1, :64] = 0.0, 0.0
    x[2, columns // 2 :] *= 0.001
    made = [normal(source, columns) + 1.0, normal(source, columns)]
    weight, bias = [*made[:weights], None, None][:2]
    ours, total = norm_round(x, residual, kind, 1e-5, weight, bias, rounding)
    apart, wanted = norm(x, kind, 1e-5, weight, bias, residual)
    theirs = round_rows(apart, rounding)
    assert torch.equal(total, wanted)
    torch.testing.assert_close(total, x + residual)
    assert torch.equal(ours.scales, theirs.scales)
    assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    assert ours.dtype is dtype
    assert ours.codes.any()


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_row_alone(bad: float, group: int) -> None:
    x, residual = normal(Source(1), 3, 192), normal(Source(2), 3, 192)
    x[1, 5] = bad
    ours, _ = norm_round(x, residual, "rms", 1e-5, None, None, Rounding(Codes.FLOAT8, group))
    theirs = round_rows(norm(x, "rms", 1e-5, None, None, residual)[0], Rounding(Codes.FLOAT8, group))
    assert torch.equal(ours.scales.isfinite(), theirs.scales.isfinite())
    assert not ours.scales[:, 1].isfinite().all()
    assert ours.scales[:, ::2].isfinite().all()


@pytest.mark.parametrize("case", CASES, ids=[f"{case.instance.op} {case.instance.where}" for case in CASES])
def test_takes_products_of_8_bit_numbers_and_agrees(case: Sample) -> None:
    op = case.instance.op
    ours, contract = BLOCKS[op], CONTRACTS[op]
    answer = ask(contract, ours, case.instance)
    if case.instance.where not in ("fp8", "fp8_block", "int8"):
        assert not answer
        assert answer.reason.endswith("is no product of 8-bit numbers")
        return
    assert answer.reason.startswith("norm and rounding in one pass; "), answer.reason
    with torch.inference_mode():
        found, wanted = run(ours, case, AT), run(ReferenceProvider(contract), case)
    tolerance = contract.tolerance[torch.float32]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=tolerance.atol, rtol=tolerance.rtol)


def block(op: str, scheme: QuantScheme, dtype: torch.dtype, lead: tuple[int, ...], biases: bool = True) -> Sample:
    """Behind a layer norm with both weights, of 256 columns."""
    source = Source(7)
    weights: dict[str, Weight] = {"norm_weight": source.normal(256) + 1.0, "norm_bias": source.normal(256)}
    attrs: dict[str, object] = {"hidden": 256, "intermediate": 256, "kind": "silu"}
    if op == "norm_linear":
        weights["weight"] = quantized(source, (384, 256), scheme)
        attrs = {"in_features": 256, "out_features": 384, "bias": biases}
    else:
        weights["gate_up"], weights["down"] = (quantized(source, (rows, 256), scheme) for rows in (512, 256))
    if biases:
        names = {"bias": 384} if op == "norm_linear" else {"gate_up_bias": 512, "down_bias": 256}
        weights |= {name: source.normal(size, dtype=dtype) for name, size in names.items()}
    contract = CONTRACTS[op]

    def make(s: Source) -> tuple[torch.Tensor, ...]:
        return s.normal(*lead, 256, dtype=dtype), s.normal(*lead, 256, dtype=dtype)

    return sample(contract, f"{scheme.name} {lead}", dtype, make, weights, norm_kind="ln", **attrs)


@pytest.mark.parametrize("lead", [(0,), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8"])
@pytest.mark.parametrize("op", BLOCKS)
def test_a_block_equals_its_parts_to_the_bit(op: str, scheme: str, lead: tuple[int, ...]) -> None:
    """What the device computes without it: add_norm, then the product on its own."""
    case = block(op, SCHEMES[scheme], torch.bfloat16, lead)
    inner = {"norm_linear": TorchLinear(), "norm_gated_mlp": EightBitMlp()}[op]
    norms = {name.removeprefix("norm_"): one for name, one in case.weights.items() if name.startswith("norm_")}
    rest = {name: one for name, one in case.weights.items() if not name.startswith("norm_")}
    attrs = {name: one for name, one in case.instance.attrs.items() if name not in ("norm_kind", "eps")}
    first = sample(
        CONTRACTS["add_norm"], "norm", torch.bfloat16, lambda _: case.make(), norms, kind="ln",
        eps=case.instance.attrs["eps"],
    )  # fmt: skip
    with torch.inference_mode():
        y, total = run(BLOCKS[op], case, AT)
        normed, summed = run(TritonAddNorm(), first, AT)
        second = sample(CONTRACTS[inner.op], "product", torch.bfloat16, lambda _: (normed,), rest, **attrs)
        wanted = run(inner, second, AT)
    assert y.shape == (*lead, 384 if op == "norm_linear" else 256)
    assert torch.equal(total, summed)
    assert torch.equal(y, wanted)


def linear(scheme: QuantScheme | None, columns: int) -> OpInstance:
    weights = {
        "norm_weight": WeightSpec((columns,), torch.float32),
        "weight": WeightSpec((64, columns), torch.bfloat16, scheme),
    }
    attrs = {"norm_kind": "rms", "in_features": columns, "out_features": 64}
    return CONTRACTS["norm_linear"].instance("here", torch.bfloat16, weights, **attrs)


def test_what_is_refused() -> None:
    ours = BLOCKS["norm_linear"]

    def why(scheme: QuantScheme | None, columns: int = 256) -> str:
        answer = ours.supports(linear(scheme, columns))
        assert not answer
        return answer.reason

    assert why(None) == why(SCHEMES["q4_0"]) == "weight is no product of 8-bit numbers"
    assert "has one" not in why(SCHEMES["q8_0"])
    odd = QuantScheme("odd", Packing.INT8, 8, 192, rounding=Rounding(Codes.INT8, 96))
    assert why(odd, 192) == "a scale per 96 columns, the norm rounds powers of two of them, or whole rows"
    long = QuantScheme("long", Packing.INT8, 8, 2 * LONGEST, rounding=Rounding(Codes.INT8))
    assert why(long, 2 * LONGEST) == f"rows of {2 * LONGEST}, the norm holds up to {LONGEST}"
    assert "multiplies no float8" in NormBlock(TorchLinear(float8=False)).supports(linear(SCHEMES["fp8"], 256)).reason
    assert ours.supports(linear(SCHEMES["int8"], 256))


def test_packed_are_the_product_and_then_a_wide_norm() -> None:
    case = block("norm_linear", SCHEMES["int8"], torch.bfloat16, (1,))
    ours = BLOCKS["norm_linear"]
    packed = ours.pack(case.instance, case.weights)
    assert [part.dtype for part in packed[-2:]] == [torch.float32] * 2
    assert torch.equal(packed[-2], case.weights["norm_weight"])
    assert torch.equal(packed[-1], case.weights["norm_bias"])
    assert sum(ours.packed_bytes(packed).values()) == sum(part.numel() * part.element_size() for part in packed)
    assert specs(case.weights, torch.bfloat16)["weight"].scheme is SCHEMES["int8"]
