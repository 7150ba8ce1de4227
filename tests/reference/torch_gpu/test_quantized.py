"""Products with weights that stay quantized: every scheme, any number of rows of x, and what the packed form weighs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hardpoint_torch_gpu import quantized as packing
from hardpoint_torch_gpu.dense import TableEmbedding, TorchLinear, TorchLogits
from hardpoint_torch_gpu.kernels.quant_gemm import Tiles, dequantize, quant_dot
from hardpoint_torch_gpu.kernels.quant_gemv import quant_gemv

from hardpoint.weights.gguf.ggml_types import GGML_TYPES, GgmlType
from hardpoint.weights.gguf.quants import convert, scheme_of
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance, Sample, Weight
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run, sample
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the conformance kit runs these"),
]

#: Schemes beyond those of the samples.
OTHERS = (
    QuantScheme("gptq4 by 128", Packing.UINT4, 4, 128, offset=True),
    QuantScheme("4 bits by 16, two levels", Packing.UINT4, 4, 16, super_group=16, offset=True),
    QuantScheme("4 bits by 48", Packing.UINT4, 4, 48, offset=True),
    QuantScheme("4 bits, no offsets", Packing.UINT4, 4, 32),
    QuantScheme("8 bits by 64, offsets", Packing.INT8, 8, 64, offset=True),
    QuantScheme("5 bits, two levels, offsets", Packing.INT8, 5, 32, super_group=8, offset=True),
    QuantScheme("8 bits by 768", Packing.INT8, 8, 768),
)
#: Those whose input is rounded are in test_eight_bits.py.
ALL = {scheme.name: scheme for scheme in (*SCHEMES.values(), *OTHERS) if scheme.rounding is None}
QUANTIZED = [kind for kind in GGML_TYPES.values() if kind.usable and scheme_of(kind) is not None]


def make(scheme: QuantScheme, rows: int, columns: int) -> QuantTensor:
    """A random weight whose offsets are no multiple of its scales."""
    weight = quantized(Source(3), (rows, columns), scheme)
    if weight.offsets is None or weight.super_offsets is not None:
        return weight
    spread = Source(4).uniform(*weight.offsets.shape, low=0.9, high=1.1)
    return replace(weight, offsets=(weight.offsets * spread).half())


def case(op: str, weight: Weight, dtype: torch.dtype, x: torch.Tensor, **attrs: Any) -> Sample:
    weights: dict[str, Weight] = {"weight": weight}
    if attrs.get("bias"):
        weights["bias"] = Source(5).normal(weight.shape[0], dtype=dtype)
    return sample(CONTRACTS[op], "test", dtype, lambda _: (x,), weights, **attrs)


def linear(weight: QuantTensor, dtype: torch.dtype, tokens: int, bias: bool = False) -> Sample:
    rows, columns = weight.shape
    x = Source(6).normal(tokens, columns, dtype=dtype)
    return case("linear", weight, dtype, x, in_features=columns, out_features=rows, bias=bias)


def product(one: Sample) -> torch.Tensor:
    """In float64."""
    (x,), weight = one.make(), one.weights["weight"]
    plain = weight.dequantize() if isinstance(weight, QuantTensor) else weight
    y = x.double() @ plain.double().T
    bias = one.weights.get("bias")
    return y if not isinstance(bias, torch.Tensor) else y + bias.double()


def check(found: torch.Tensor, wanted: torch.Tensor, op: str, dtype: torch.dtype) -> None:
    tolerance = CONTRACTS[op].tolerance[dtype]
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance.atol, rtol=tolerance.rtol)


def columns_of(scheme: QuantScheme, least: int = 300) -> int:
    """More than `least` in whole groups: no multiple of a block where the groups allow it."""
    unit = scheme.group * max(scheme.super_group, 1)
    return (least // unit + 1) * unit


def packed(weight: QuantTensor, dtype: torch.dtype) -> tuple[packing.QuantWeight, OpInstance]:
    instance = linear(weight, dtype, 1).instance
    return packing.unpacked(instance, packing.pack(weight, dtype)), instance


@pytest.mark.parametrize("tokens", [1, 3, 17, 40])
@pytest.mark.parametrize("name", ALL)
def test_every_scheme_with_any_number_of_rows(name: str, tokens: int) -> None:
    rows = 150 if tokens == 40 else 35  # enough for large tiles on this host's one processor
    weight = make(ALL[name], rows, columns_of(ALL[name]))
    one = linear(weight, torch.float16, tokens, bias=tokens != 3)
    assert "stays packed" in TorchLinear().supports(one.instance).reason
    found = run(TorchLinear(), one)
    assert found.dtype is torch.float16
    check(found, product(one), "linear", torch.float16)


@pytest.mark.parametrize("name", ALL)
def test_float32_activations_round_nothing(name: str) -> None:
    one = linear(make(ALL[name], 35, columns_of(ALL[name], 40)), torch.float32, 3)
    check(run(TorchLinear(), one), product(one), "linear", torch.float32)


def test_many_rows_take_the_librarys_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SCRATCH", 128 * 320)  # two passes over the weight
    one = linear(make(ALL["q4_k"], 150, 512), torch.float16, 257, bias=True)
    check(run(TorchLinear(), one), product(one), "linear", torch.float16)


TILES = (
    *(Tiles(64, 16, 128, 128, late, splits, 2, 3) for late in (False, True) for splits in (1, 3)),
    Tiles(64, 8, 128, 32, True, 2, 4, 2),
    Tiles(128, 16, 64, 64, False, 1, 8, 2),
)


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("name", ["gptq4 by 128", "8 bits by 768"])
def test_every_way_to_cut_a_product(name: str, tiles: Tiles) -> None:
    weight = make(ALL[name], 70, columns_of(ALL[name], 500))
    one = linear(weight, torch.float16, 5)
    ours, _ = packed(weight, torch.float16)
    for _ in range(2):  # the second finds the locks as the first left them
        check(quant_dot(one.make()[0], ours, None, torch.float32, tiles), product(one), "linear", torch.float16)


@pytest.mark.parametrize("cut", [(32, 4, 1), (128, 4, 3)])
@pytest.mark.parametrize("name", ["q4_1", "q4_0", "gptq4 by 128", "q8_0", "8 bits by 64, offsets", "q6_k"])
def test_one_row_by_the_gemv(name: str, cut: tuple[int, int, int]) -> None:
    weight = make(ALL[name], 35, columns_of(ALL[name]))
    if name == "q4_0":
        weight = quantized(Source(3), weight.shape, ALL[name])
    one = linear(weight, torch.float16, 1, bias=True)
    ours, _ = packed(weight, torch.float16)
    bias = one.weights["bias"]
    assert isinstance(bias, torch.Tensor)
    for _ in range(2):
        found = quant_gemv(one.make()[0], ours, bias, torch.float32, *cut, warps=4)
        check(found, product(one), "linear", torch.float16)


def test_a_row_does_not_depend_on_its_company() -> None:
    one = linear(make(ALL["q4_1"], 40, 320), torch.float16, 7)
    (x,) = one.make()
    ours, _ = packed(one.weights["weight"], torch.float16)  # type: ignore[arg-type]
    alone = x.clone()
    alone[:3] = float("nan")
    both = [packing.quant_product(rows, ours, None, torch.float16) for rows in (x, alone)]
    assert torch.equal(both[0][3:], both[1][3:])


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_types_of_files_are_exact_and_not_much_larger(kind: GgmlType) -> None:
    """Plain again, each weight is that of the file, rounded once to float32; and the packed form is as large."""
    rows, columns = 128, 512
    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 256, (rows * columns // kind.block, kind.bytes), dtype=np.uint8)
    weight = convert(kind, (rows, columns), with_small_scales(kind, blocks, generator).reshape(-1))
    assert isinstance(weight, QuantTensor)
    ours, instance = packed(weight, torch.float32)
    wanted = weight.dequantize()
    torch.testing.assert_close(dequantize(ours, 0, rows, torch.float32), wanted, rtol=1e-6, atol=1e-6)
    parts = packing.pack(weight, torch.float16)
    narrow = packing.unpacked(instance, parts)
    torch.testing.assert_close(dequantize(narrow, 0, rows, torch.float16).float(), wanted, rtol=2e-3, atol=2e-3)
    size = sum(part.numel() * part.element_size() for part in parts)
    width = 0.5 if weight.scheme.packing is Packing.UINT4 else 1.0
    per_group = 2 if not narrow.offsets.numel() else 4
    assert size <= rows * columns * (width + per_group / weight.scheme.group) + 100
    if kind.name in ("Q4_0", "Q4_1", "Q4_K", "Q8_0", "IQ4_NL", "MXFP4"):
        assert size <= 1.12 * blocks.size


def with_small_scales(kind: GgmlType, blocks: np.ndarray[Any, Any], generator: np.random.Generator) -> Any:
    """Blocks whose fp16 scales are no infinity: the weights of each are of a usual size."""
    fields = {
        "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
        "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,),
        "TQ2_0": (64,),
    }  # fmt: skip
    for start in fields.get(kind.name, ()):
        scales = generator.uniform(0.001, 0.002, len(blocks)).astype("<f2")
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind.name == "MXFP4":
        blocks[:, 0] = generator.integers(115, 122, len(blocks))
    if kind.name == "NVFP4":
        blocks[:, :4] = generator.integers(20, 60, (len(blocks), 4))
    return blocks


def test_logits_are_float32_sums_with_scale_and_cap() -> None:
    weight = make(ALL["q6_k"], 70, 256)
    one = case("logits", weight, torch.float16, Source(6).normal(3, 256, dtype=torch.float16), scale=0.5, softcap=2.0)
    found = run(TorchLogits(), one)
    assert found.dtype is torch.float32
    check(found, 2.0 * torch.tanh(product(one) * 0.5 / 2.0), "logits", torch.float16)


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_rows_of_a_quantized_table(scale: float) -> None:
    weight = make(ALL["4 bits by 48"], 70, 336)
    ids = torch.tensor([69, 0, 3, 3, 68])
    one = case("embedding", weight, torch.float16, ids, scale=scale)
    check(run(TableEmbedding(), one), weight.dequantize()[ids] * scale, "embedding", torch.float16)
    assert run(TableEmbedding(), case("embedding", weight, torch.float16, ids[:0])).shape == (0, 336)


def refused() -> Iterator[Any]:
    yield pytest.param(QuantScheme("by 8", Packing.UINT4, 4, 8, offset=True), "groups of 8 columns", id="group")
    yield pytest.param(QuantScheme("table", Packing.INT8, 8, 32, codebook=True), "more than 16 numbers", id="table")


@pytest.mark.parametrize(("scheme", "reason"), refused())
@pytest.mark.parametrize("provider", [TorchLinear(), TorchLogits()], ids=lambda provider: provider.op)
def test_what_no_kernel_takes_is_made_plain_at_load(provider: OpProvider, scheme: QuantScheme, reason: str) -> None:
    weight = quantized(Source(3), (20, 64), scheme)
    if scheme.codebook:
        weight = replace(weight, values=weight.values & 127)
    x = Source(6).normal(2, 64)
    attrs = {"in_features": 64, "out_features": 20} if provider.op == "linear" else {}
    one = case(provider.op, weight, torch.float32, x, **attrs)
    support = provider.supports(one.instance)
    assert support
    assert "dequantized at load" in support.reason
    assert reason in support.reason
    (plain,) = provider.pack(one.instance, one.weights)
    assert torch.equal(plain, weight.dequantize())
    check(run(provider, one), product(one), provider.op, torch.float32)


def test_no_rows_at_all() -> None:
    one = linear(make(ALL["q4_1"], 40, 320), torch.float16, 0)
    assert run(TorchLinear(), one).shape == (0, 40)
