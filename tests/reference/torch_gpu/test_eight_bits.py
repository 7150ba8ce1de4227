"""Products of 8-bit numbers: how x is rounded, every scheme and shape, what is refused, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu import eight_bits
from hardpoint_torch_gpu.dense import TorchLinear, TorchLogits
from hardpoint_torch_gpu.experts import TritonExperts, eight_bit_cutting
from hardpoint_torch_gpu.kernels import round_input as rounding_kernel
from hardpoint_torch_gpu.kernels.eight_bit_gemm import EightBitCut, EightBitWeight, eight_bit_dot
from hardpoint_torch_gpu.kernels.round_input import Rounded, round_rows

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample, Weight
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run, sample
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, QuantTensor, Rounding, round_input
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the conformance kit runs these"),
]

F32, F8, I8 = torch.float32, Packing.FLOAT8, Packing.INT8
INTS, FLOATS = Rounding(Codes.INT8), Rounding(Codes.FLOAT8)
REFERENCE = {provider.op: provider for provider in reference_providers()}
#: Schemes and columns: whole rows and groups, of either operand, with a last step that is not full.
CASES = {
    "fp8": (QuantScheme("fp8", F8, 8, 320, rounding=FLOATS), 320),
    "int8": (QuantScheme("int8", I8, 8, 320, rounding=INTS), 320),
    "int8, odd columns": (QuantScheme("int8", I8, 8, 77, rounding=Rounding(Codes.INT8, 77)), 77),
    "fp8 by 128 x 128": (SCHEMES["fp8_block"], 384),
    "fp8 by 20 x 64": (QuantScheme("b", F8, 8, 64, group_rows=20, rounding=Rounding(Codes.FLOAT8, 64)), 192),
    "int8 by 32, x whole": (QuantScheme("g", I8, 8, 32, rounding=INTS), 160),
    "fp8, x by 96": (QuantScheme("x", F8, 8, 192, rounding=Rounding(Codes.FLOAT8, 96)), 192),
    "int8, rows by 3": (QuantScheme("r", I8, 8, 256, group_rows=3, rounding=INTS), 256),
}


def linear(scheme: QuantScheme, rows: int, columns: int, tokens: int, dtype: torch.dtype, bias: bool = False) -> Sample:
    weights: dict[str, Weight] = {"weight": quantized(Source(3), (rows, columns), scheme)}
    if bias:
        weights["bias"] = Source(5).normal(rows, dtype=dtype)
    x = Source(6).normal(tokens, columns, dtype=dtype)
    x[1::3] *= 30.0  # each row has a scale of its own
    attrs = {"in_features": columns, "out_features": rows, "bias": bias}
    return sample(CONTRACTS["linear"], "test", dtype, lambda _: (x,), weights, **attrs)


def exact(one: Sample) -> torch.Tensor:
    """In float64."""
    (x,), weight = one.make(), one.weights["weight"]
    assert isinstance(weight, QuantTensor)
    assert weight.scheme.rounding is not None
    y: torch.Tensor = round_input(x, weight.scheme.rounding).double() @ weight.dequantize().double().T
    bias = one.weights.get("bias")
    return y + bias.double() if isinstance(bias, torch.Tensor) else y


def check(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, loose: float = 1.0) -> None:
    tolerance = CONTRACTS["linear"].tolerance[dtype]
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance.atol * loose, rtol=tolerance.rtol)


def plain(x: Rounded, rounding: Rounding) -> torch.Tensor:
    groups = x.codes.float().unflatten(-1, (-1, rounding.group or x.codes.shape[1]))
    numbers: torch.Tensor = (groups * x.scales.t()[:, :, None]).flatten(1)
    return numbers


def ties(codes: Codes) -> torch.Tensor:
    """Two rows: all that lies halfway between two codes, and all codes, of either sign; the scale is 1."""
    if codes is Codes.INT8:
        numbers = torch.arange(128.0)
    else:
        numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (numbers[1:] + numbers[:-1]) / 2
    halves = torch.cat((halves, numbers[-1:]))
    return torch.stack((torch.cat((halves, -halves)), torch.cat((numbers, -numbers))))


@pytest.mark.parametrize("codes", Codes)
def test_ties_and_every_code(codes: Codes) -> None:
    x = ties(codes)
    found = round_rows(x, Rounding(codes))
    assert torch.equal(found.scales, torch.ones(1, 2))
    assert torch.equal(found.codes[1].float(), x[1])
    wanted = x[0].round() if codes is Codes.INT8 else x[0].to(torch.float8_e4m3fn).float()
    assert torch.equal(found.codes[0].float(), wanted)


@pytest.mark.parametrize("dtype", [F32, torch.float16], ids=str)
@pytest.mark.parametrize("codes", Codes)
@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 300, 0), (37, 256, 128), (3, 96, 96), (2, 480, 48)])
def test_rounds_as_the_reference(codes: Codes, dtype: torch.dtype, rows: int, columns: int, group: int) -> None:
    x = Source(1).normal(rows, columns, dtype=dtype, scale=20.0)
    x[:, : columns // 4] *= 2.0**-9  # subnormal codes
    x[-1] = 0.0
    rounding = Rounding(codes, group)
    found = round_rows(x, rounding)
    assert found.scales.shape == (columns // (group or columns), rows)
    assert torch.equal(plain(found, rounding), round_input(x, rounding))
    if rows > 1:
        assert not found.codes[-1].float().any()
        assert not found.scales[:, -1].any()


@pytest.mark.parametrize("codes", Codes)
def test_rows_longer_than_registers_hold(codes: Codes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding_kernel, "_HELD", 128)
    x = Source(1).normal(3, 300)
    x[0, 299], x[1, 130], x[2, 0] = 9.0, -8.0, 7.0
    assert torch.equal(plain(round_rows(x, Rounding(codes)), Rounding(codes)), round_input(x, Rounding(codes)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("codes", Codes)
def test_what_is_no_number_spoils_its_row_alone(codes: Codes, bad: float) -> None:
    x = Source(1).normal(3, 64)
    x[1, 5] = bad
    scheme = QuantScheme("s", F8 if codes is Codes.FLOAT8 else I8, 8, 64, rounding=Rounding(codes))
    weight = quantized(Source(3), (20, 64), scheme)
    y = product(x, held(weight), 64)
    assert torch.equal(y.isfinite().any(1), torch.tensor([True, False, True]))


def product(x: torch.Tensor, weight: EightBitWeight, step: int) -> torch.Tensor:
    return eight_bits.rounded_product(weight.rounded(x), weight, None, step)


def held(weight: QuantTensor) -> EightBitWeight:
    rows, columns = weight.shape
    one = linear(weight.scheme, rows, columns, 1, F32)
    return eight_bits.unpacked(one.instance, eight_bits.pack(weight))


@pytest.mark.parametrize("tokens", [1, 2, 13, 33, 70])
@pytest.mark.parametrize("name", CASES)
def test_every_scheme_with_any_number_of_rows(name: str, tokens: int) -> None:
    scheme, columns = CASES[name]
    dtype = F32 if tokens in (1, 33) else torch.float16
    one = linear(scheme, 150, columns, tokens, dtype, bias=tokens != 13)
    answer = TorchLinear().supports(one.instance)
    assert answer
    assert "products of 8-bit numbers" in answer.reason
    found = run(TorchLinear(), one)
    assert found.dtype is dtype
    check(found, exact(one), dtype, 30.0)  # rows thirty times as large
    check(found[0], exact(one)[0], dtype)


@pytest.mark.parametrize("name", ["fp8", "fp8 by 128 x 128", "int8"])
def test_many_rows(name: str) -> None:
    scheme, columns = CASES[name]
    one = linear(scheme, 130, columns, 300, F32)
    check(run(TorchLinear(), one), exact(one), F32, 30.0)


def test_sums_of_integers_are_exact() -> None:
    """Larger than float32 holds to the unit: 127 * 127 * 2048 + 1."""
    scheme = QuantScheme("int8", I8, 8, 2048, rounding=INTS)
    values = torch.full((16, 2048), 127, dtype=torch.int8)
    values[1, 0], values[1, 1] = 127, 126
    ours = held(QuantTensor(scheme, (16, 2048), values, torch.ones(16, 1)))
    x = Rounded(torch.full((1, 2048), 127, dtype=torch.int8), torch.full((1, 1), 2.0**-7), F32)
    y = eight_bit_dot(x, ours, None, EightBitCut(64, 8, 128, 1, 4, 1)) * 2.0**7
    assert (y[0, 0] - y[0, 1]).item() == pytest.approx(127, abs=4)
    assert y[0, 0].item() == torch.tensor(127.0 * 127.0 * 2048).item()


def test_the_librarys_product() -> None:
    """torch has it for the host too."""
    weight = quantized(Source(3), (64, 256), SCHEMES["fp8"])
    x = Source(6).normal(33, 256, dtype=torch.bfloat16)
    found = eight_bits.by_library(round_rows(x.float(), FLOATS), held(weight))
    check(found, round_input(x, FLOATS).double() @ weight.dequantize().double().T, torch.bfloat16)


CUTS = (EightBitCut(64, 8, 64, 3, 2, 3), EightBitCut(32, 16, 32, 2, 4, 2), EightBitCut(128, 32, 128, 1, 8, 3))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", ["fp8 by 128 x 128", "int8"])
def test_every_way_to_cut_a_product(name: str, cut: EightBitCut) -> None:
    scheme, columns = CASES[name]
    one = linear(scheme, 150, columns, 7, F32)
    (x,), weight = one.make(), one.weights["weight"]
    assert isinstance(weight, QuantTensor)
    assert weight.scheme.rounding is not None
    ours = held(weight)
    for _ in range(2):  # the second finds the locks as the first left them
        check(eight_bit_dot(round_rows(x, weight.scheme.rounding), ours, None, cut), exact(one), F32, 30.0)


def test_a_row_does_not_depend_on_its_company() -> None:
    scheme, columns = CASES["fp8 by 128 x 128"]
    ours = held(quantized(Source(3), (40, columns), scheme))
    x = Source(6).normal(7, columns)
    spoiled = x.clone()
    spoiled[:3] = float("nan")
    both = [product(rows, ours, 128) for rows in (x, spoiled)]
    assert torch.equal(both[0][3:], both[1][3:])


def test_no_rows_at_all_and_zeros() -> None:
    one = linear(SCHEMES["fp8"], 40, 256, 0, F32)
    assert run(TorchLinear(), one).shape == (0, 40)
    weight = quantized(Source(3), (40, 256), SCHEMES["int8"])
    assert not product(torch.zeros(6, 256), held(weight), 128).any()


def test_leading_dimensions_and_views() -> None:
    one, provider = linear(SCHEMES["fp8_block"], 40, 256, 6, F32), TorchLinear()
    weight = one.weights["weight"]
    assert isinstance(weight, QuantTensor)
    x = Source(6).normal(256, 6).t()
    found = provider.build(one.instance)(x.view(2, 3, 256), provider.pack(one.instance, one.weights))
    assert torch.equal(found.view(6, 40), product(x.contiguous(), held(weight), 128))


def test_a_packed_weight_is_as_large_as_in_the_file() -> None:
    for name in ("fp8", "fp8_block", "int8"):
        weight = quantized(Source(3), (256, 256), SCHEMES[name])
        parts = eight_bits.pack(weight)
        assert parts[0].data_ptr() == weight.values.data_ptr()
        assert sum(part.nbytes for part in parts) <= 256 * 256 + 4 * weight.scales.numel() + 4 * 16


REFUSED = (
    (QuantScheme("a", I8, 8, 64, rounding=Rounding(Codes.FLOAT8)), "rounded to float8, the weight is int8", "packed"),
    (QuantScheme("b", Packing.UINT4, 4, 64, offset=True, rounding=INTS), "the weight is uint4", "packed"),
    (QuantScheme("c", I8, 8, 64, offset=True, rounding=INTS), "offsets", "packed"),
    (QuantScheme("d", I8, 8, 16, rounding=INTS), "groups of 16 columns", "packed"),
    (QuantScheme("e", I8, 8, 64, rounding=Rounding(Codes.INT8, 48)), "groups of 64 and 48 columns", "packed"),
    (QuantScheme("f", I8, 8, 64, group_rows=2, rounding=Rounding(Codes.INT8, 8)), "groups of 64 and 8", "at load"),
)


@pytest.mark.parametrize(("scheme", "reason", "how"), REFUSED, ids=lambda part: getattr(part, "name", None))
def test_what_the_kernels_do_not_take_is_rounded_apart(scheme: QuantScheme, reason: str, how: str) -> None:
    one = linear(scheme, 40, 192, 3, F32, bias=True)
    answer = TorchLinear().supports(one.instance)
    assert answer
    assert reason in answer.reason
    assert how in answer.reason
    check(run(TorchLinear(), one), exact(one), F32, 30.0)


def test_a_device_without_8_bit_floats() -> None:
    one = linear(SCHEMES["fp8"], 40, 256, 3, F32)
    answer = TorchLinear(float8=False).supports(one.instance)
    assert answer
    assert "dequantized at load" in answer.reason
    assert "multiplies no float8_e4m3fn" in answer.reason
    check(run(TorchLinear(float8=False), one), exact(one), F32, 30.0)
    integers = linear(SCHEMES["int8"], 40, 256, 3, F32)
    assert "8-bit numbers" in TorchLinear(float8=False).supports(integers.instance).reason


@pytest.mark.parametrize("name", ["fp8_block", "int8"])
def test_other_ops_do_not_round(name: str) -> None:
    weight = quantized(Source(3), (70, 256), SCHEMES[name])
    one = sample(CONTRACTS["logits"], "test", F32, lambda s: (s.normal(3, 256),), {"weight": weight})
    check(run(TorchLogits(), one), one.make()[0].double() @ weight.dequantize().double().T, F32)


def expert_case(up: QuantScheme, down: Weight | QuantScheme, inner: int, dtype: torch.dtype, **attrs: Any) -> Sample:
    ids = attrs.pop("ids", Source(7).integers(0, 3, 6, 2))
    hidden = 256
    weights: dict[str, Weight] = {
        "gate_up": quantized(Source(3), (3, 2 * inner, hidden), up),
        "down": quantized(Source(4), (3, hidden, inner), down) if isinstance(down, QuantScheme) else down,
        "gate_up_bias": Source(5).normal(3, 2 * inner, dtype=dtype),
        "down_bias": Source(6).normal(3, hidden, dtype=dtype),
    }
    full = {"experts": 3, "top_k": ids.shape[1], "hidden": hidden, "intermediate": inner, **attrs}

    def make(s: Source) -> tuple[Any, ...]:
        return s.normal(ids.shape[0], hidden, dtype=dtype), s.uniform(*ids.shape, low=0.1), ids

    return sample(CONTRACTS["experts"], "test", dtype, make, weights, **full)


def agree(provider: OpProvider, one: Sample, loose: float = 1.0) -> None:
    found, wanted = run(provider, one), run(REFERENCE["experts"], one)
    tolerance = CONTRACTS["experts"].tolerance[one.instance.dtype]
    # A sum that ends differently in its last bit may be rounded to the next code.
    torch.testing.assert_close(found, wanted, atol=tolerance.atol * loose, rtol=tolerance.rtol)


EXPERTS = {
    "fp8": (SCHEMES["fp8"], replace(SCHEMES["fp8"], group=96), 96),
    "int8": (SCHEMES["int8"], replace(SCHEMES["int8"], group=96), 96),
    "blocks": (SCHEMES["fp8_block"], SCHEMES["fp8_block"], 128),
    "blocks that no expert fills": (
        replace(SCHEMES["fp8_block"], group_rows=100),
        replace(SCHEMES["fp8_block"], group_rows=100),
        128,
    ),
}


@pytest.mark.parametrize("dtype", [F32, torch.float16], ids=str)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str, dtype: torch.dtype) -> None:
    up, down, inner = EXPERTS[name]
    one = expert_case(up, down, inner, dtype, interleaved=name == "int8")
    answer = TritonExperts().supports(one.instance)
    assert answer
    assert answer.reason.count("products of 8-bit numbers") == 2
    assert len(TritonExperts().pack(one.instance, one.weights)) == 2 * eight_bits.PARTS + 2
    agree(TritonExperts(), one, 1.0 if dtype is F32 else 16.0)


def test_experts_whose_token_is_weighed_first() -> None:
    ids = Source(7).integers(0, 3, 40, 1)
    agree(TritonExperts(), expert_case(*EXPERTS["int8"], F32, ids=ids, weight_on_input=True))


def test_experts_of_two_kinds_and_of_devices_without_8_bit_floats() -> None:
    mixed = expert_case(SCHEMES["int8"], SCHEMES["q8_0"], 96, F32)
    reason = TritonExperts().supports(mixed.instance).reason
    assert "gate_up int8 stays packed, products of 8-bit numbers; down q8_0 stays packed" in reason
    agree(TritonExperts(), mixed)
    beside = expert_case(SCHEMES["fp8"], Source(4).normal(3, 256, 96, scale=0.1), 96, F32)
    agree(TritonExperts(), beside)
    without = TritonExperts(float8=False)
    assert "gate_up fp8 dequantized at load" in without.supports(beside.instance).reason
    agree(without, beside)


def test_no_tokens_for_experts() -> None:
    none = torch.zeros((0, 2), dtype=torch.int64)
    assert run(TritonExperts(), expert_case(*EXPERTS["blocks"], F32, ids=none)).shape == (0, 256)


def test_cuts_of_experts_hold_their_tiles() -> None:
    assert [eight_bit_cutting(tokens, 64).tokens for tokens in (16, 32, 64, 128)] == [16, 32, 64, 128]
