"""Contract: token embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample, Weight
from hardpoint_platforms.ops.samples import POINTWISE, SCHEMES, Source, quantized, sample
from hardpoint_platforms.reference.embedding import build_embedding
from hardpoint_platforms.versioning import Version


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    source = Source(1)
    plain = source.normal(50, 24, dtype=dtype)
    packed = quantized(source, (40, 256), SCHEMES["q6_k"])
    yield _case(dtype, "seven tokens", plain, 7)
    yield _case(dtype, "one token", plain, 1)
    yield _case(dtype, "scale", plain, 5, 24**0.5)
    yield _case(dtype, "q6_k", packed, 6)


def _case(dtype: torch.dtype, where: str, weight: Weight, tokens: int, scale: float = 1.0) -> Sample:
    rows = weight.shape[0]
    return sample(EMBEDDING, where, dtype, lambda s: (s.integers(0, rows, tokens),), {"weight": weight}, scale=scale)


EMBEDDING = OpContract(
    name="embedding",
    version=Version(1, 0),
    altitude=Altitude.PRIMITIVE,
    signature="embedding(ids: int64 [T], w: (weight [V, H],)) -> [T, H]",
    doc="Rows of the table, times `scale`. Ids are in [0, V).",
    attributes={"scale": Attribute("factor on the rows", 1.0)},
    reference=build_embedding,
    samples=_samples,
    tolerance=POINTWISE,
    weights=("weight",),
)
