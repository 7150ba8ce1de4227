"""Contract: low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample
from hardpoint_platforms.ops.samples import SUMS, Source, sample
from hardpoint_platforms.reference.lora import build_lora
from hardpoint_platforms.versioning import Version


def _arguments(dtype: torch.dtype, slots: list[int], s: Source) -> tuple[torch.Tensor, ...]:
    tokens = len(slots)
    return s.normal(tokens, 24, dtype=dtype), s.normal(tokens, 32, dtype=dtype), torch.tensor(slots)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    source = Source(11)
    for where, slots, rank in (
        ("several adapters", [0, 2, -1, 1, 2], 4),
        ("none", [-1, -1], 4),
        ("one token, rank 1", [1], 1),
    ):
        weights = {
            "a": source.normal(3, rank, 32, dtype=dtype, scale=32**-0.5),
            "b": source.normal(3, 24, rank, dtype=dtype),
        }
        yield sample(
            LORA,
            where,
            dtype,
            partial(_arguments, dtype, slots),
            weights,
            in_features=32,
            out_features=24,
            rank=rank,
            slots=3,
        )


LORA = OpContract(
    name="lora",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature="lora(y: [T, N], x: [T, K], slots: int64 [T], w: (a [S, r, K], b [S, N, r])) -> [T, N]",
    doc=(
        "y + b[slot] (a[slot] x) per token (Hu et al. 2021); slot -1 leaves y as it is. The adapter's scale is part "
        "of b; an adapter of lower rank is filled up with zeros."
    ),
    attributes={
        "in_features": Attribute("K", required=True),
        "out_features": Attribute("N", required=True),
        "rank": Attribute("r, the largest rank", required=True),
        "slots": Attribute("S, adapters that can be loaded at once", required=True),
    },
    reference=build_lora,
    samples=_samples,
    tolerance=SUMS,
    weights=("a", "b"),
    mutates=("y",),
)
