"""Contract: projection of hidden states onto the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample, Weight
from hardpoint_platforms.ops.samples import SCHEMES, SUMS, Source, quantized, sample
from hardpoint_platforms.reference.logits import build_logits
from hardpoint_platforms.versioning import Version


def _arguments(dtype: torch.dtype, rows: int, columns: int, s: Source) -> tuple[torch.Tensor, ...]:
    return (s.normal(rows, columns, dtype=dtype),)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    source = Source(4)
    plain: dict[str, Weight] = {"weight": source.matrix(509, 64, dtype)}
    biased = {**plain, "bias": source.normal(509, dtype=dtype)}
    packed: dict[str, Weight] = {"weight": quantized(source, (96, 256), SCHEMES["q4_k"])}
    cases: tuple[tuple[str, int, dict[str, Weight], float, float | None], ...] = (
        ("plain", 3, plain, 1.0, None),
        ("one row", 1, plain, 1.0, None),
        ("scale", 2, plain, 0.25, None),
        ("softcap", 2, plain, 1.0, 1.5),
        ("scale, softcap, bias", 2, biased, 2.0, 3.0),
        ("q4_k", 2, packed, 1.0, None),
    )
    for where, rows, weights, scale, softcap in cases:
        columns = weights["weight"].shape[1]
        yield sample(
            LOGITS,
            where,
            dtype,
            partial(_arguments, dtype, rows, columns),
            weights,
            scale=scale,
            softcap=softcap,
        )


LOGITS = OpContract(
    name="logits",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature="logits(hidden: [R, H], w: (weight [V, H], bias [V]?)) -> float32 [R, V]",
    doc="(hidden weight^T + bias) * scale, then softcap * tanh(logits / softcap). The result is float32.",
    attributes={
        "scale": Attribute("factor on the logits", 1.0),
        "softcap": Attribute("bound of the logits, None for none"),
    },
    reference=build_logits,
    samples=_samples,
    tolerance=SUMS,
    weights=("weight", "bias?"),
)
