"""Contract: linear layers over plain and quantized weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample, Weight
from hardpoint_platforms.ops.samples import SCHEMES, SUMS, Source, quantized, sample
from hardpoint_platforms.reference.linear import build_linear
from hardpoint_platforms.versioning import Version


def _case(dtype: torch.dtype, where: str, shape: tuple[int, ...], weight: Weight, bias: bool) -> Sample:
    rows, columns = weight.shape
    weights: dict[str, Weight] = {"weight": weight}
    if bias:
        weights["bias"] = Source(5).normal(rows, dtype=dtype)
    return sample(
        LINEAR,
        where,
        dtype,
        lambda s: (s.normal(*shape, columns, dtype=dtype),),
        weights,
        in_features=columns,
        out_features=rows,
        bias=bias,
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    source = Source(2)
    for tokens, rows, columns, bias in ((6, 32, 48, False), (1, 32, 48, True), (3, 17, 33, True), (130, 8, 16, False)):
        weight = source.matrix(rows, columns, dtype)
        yield _case(dtype, f"{tokens}x{columns} to {rows}", (tokens,), weight, bias)
    yield _case(dtype, "two leading dimensions", (2, 5), source.matrix(12, 20, dtype), False)
    for name, scheme in SCHEMES.items():
        yield _case(dtype, name, (3,), quantized(source, (24, 256), scheme), bias=name == "q8_0")


LINEAR = OpContract(
    name="linear",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature="linear(x: [..., K], w: (weight [N, K], bias [N]?)) -> [..., N]",
    doc="x weight^T + bias. The weight may be a QuantTensor; `pack` gives it the kernel's own layout, once.",
    attributes={
        "in_features": Attribute("K", required=True),
        "out_features": Attribute("N", required=True),
        "bias": Attribute("whether a bias is added", False, choices=(False, True)),
    },
    reference=build_linear,
    samples=_samples,
    tolerance=SUMS,
    weights=("weight", "bias?"),
)
