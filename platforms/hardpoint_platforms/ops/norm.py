"""Contracts: normalization, alone and after a residual addition."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample
from hardpoint_platforms.ops.samples import POINTWISE, Source, sample
from hardpoint_platforms.reference.norm import build_add_norm, build_norm
from hardpoint_platforms.versioning import Version

KINDS = ("rms", "rms1p", "ln", "l2")

#: Attributes of whatever norms.
ATTRIBUTES = {
    "kind": Attribute(
        "rms: x / sqrt(mean(x^2) + eps) * w; rms1p: times 1 + w; ln: layer norm; l2: x / sqrt(sum(x^2) + eps) * w",
        required=True,
        choices=KINDS,
    ),
    "eps": Attribute("added under the root", 1e-6),
}


def _cases(contract: OpContract, dtype: torch.dtype, inputs: int) -> Iterator[Sample]:
    source = Source(3)

    def case(kind: str, shape: tuple[int, ...], *weights: torch.Tensor, scale: float = 3.0) -> Sample:
        def make(s: Source) -> tuple[torch.Tensor, ...]:
            made = [s.normal(*shape, dtype=dtype, scale=scale) for _ in range(inputs)]
            for x in made:
                x[-1, ..., : shape[-1] // 2] *= 0.01  # small and large values in one row
            return tuple(made)

        named = dict(zip(("weight", "bias"), weights, strict=False))
        return sample(
            contract,
            f"{kind} {shape}, {len(named)} weights, values of size {scale}",
            dtype,
            make,
            named,
            kind=kind,
            eps=1e-5,
        )

    yield case("rms", (5, 64), source.normal(64) + 1.0)
    yield case("rms", (1, 33), source.normal(33) + 1.0)
    yield case("rms", (4, 3, 16), source.normal(16) + 1.0)
    yield case("rms", (4, 16))
    yield case("rms", (2, 32), source.normal(32), scale=200.0)
    yield case("rms", (2, 32), source.normal(32), scale=0.0)
    yield case("rms1p", (5, 64), source.normal(64))
    yield case("ln", (5, 48), source.normal(48) + 1.0, source.normal(48))
    yield case("ln", (5, 48), source.normal(48) + 1.0)
    yield case("ln", (2, 7))
    yield case("ln", (3, 4, 16), source.normal(4, 16) + 1.0)
    yield case("l2", (6, 2, 32))


def _norm_samples(dtype: torch.dtype) -> Iterator[Sample]:
    return _cases(NORM, dtype, 1)


def _add_norm_samples(dtype: torch.dtype) -> Iterator[Sample]:
    return _cases(ADD_NORM, dtype, 2)


NORM = OpContract(
    name="norm",
    version=Version(1, 0),
    altitude=Altitude.PRIMITIVE,
    signature="norm(x: [..., H], w: (weight [H] or [h, H], bias [H]?)) -> [..., H]",
    doc="Over the last dimension, computed in float32. A weight [h, H] has a row for each head of x [T, h, H].",
    attributes=ATTRIBUTES,
    reference=build_norm,
    samples=_norm_samples,
    tolerance=POINTWISE,
    weights=("weight?", "bias?"),
    wide_weights=("weight", "bias"),
)

ADD_NORM = OpContract(
    name="add_norm",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature="add_norm(x: [..., H], residual: [..., H], w: (weight?, bias?)) -> (normed, new_residual)",
    doc="new_residual = x + residual, normed = norm(new_residual).",
    attributes=ATTRIBUTES,
    reference=build_add_norm,
    samples=_add_norm_samples,
    tolerance=POINTWISE,
    weights=("weight?", "bias?"),
    mutates=("x", "residual"),
    wide_weights=("weight", "bias"),
)
