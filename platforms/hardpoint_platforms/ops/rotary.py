"""Contract: rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample
from hardpoint_platforms.ops.samples import POINTWISE, Source, sample
from hardpoint_platforms.reference.rotary import build_rope
from hardpoint_platforms.versioning import Version


def rope_table(positions: int, rotary_dim: int, base: float = 10000.0, scale: float = 1.0) -> torch.Tensor:
    """float32 [positions, rotary_dim]: cosines, then sines, of the plain frequencies, times `scale`."""
    frequency = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return (torch.cat((angle.cos(), angle.sin()), dim=-1) * scale).to(torch.float32)


def _case(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    rotated: int,
    interleaved: bool = False,
    tail: bool = False,
    scale: float = 1.0,
) -> Sample:
    tokens, heads, kv_heads, size = shape

    def make(s: Source) -> tuple[Any, ...]:
        q = s.normal(tokens, heads, size, dtype=dtype)
        return q, s.normal(tokens, kv_heads, size, dtype=dtype), s.integers(0, 3000, tokens)

    return sample(
        ROPE,
        f"{rotated} of {size}, interleaved={interleaved}, tail={tail}",
        dtype,
        make,
        {"table": rope_table(3000, rotated, scale=scale)},
        rotary_dim=rotated,
        interleaved=interleaved,
        tail=tail,
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield _case(dtype, (6, 4, 2, 16), 16)
    yield _case(dtype, (1, 1, 1, 64), 64)
    yield _case(dtype, (5, 6, 2, 16), 16, interleaved=True)
    yield _case(dtype, (5, 2, 2, 20), 8, scale=1.2)
    yield _case(dtype, (5, 2, 1, 20), 8, interleaved=True, tail=True)
    yield _case(dtype, (3, 2, 1, 24), 10, tail=True)


ROPE = OpContract(
    name="rope",
    version=Version(1, 0),
    altitude=Altitude.PRIMITIVE,
    signature="rope(q: [T, h, d], k: [T, hk, d], positions: int64 [T], w: (table [P, rotary_dim],)) -> (q, k)",
    doc=(
        "Rotate pairs of the rotated part by the angles of the position (Su et al. 2021). Row p of the table holds "
        "rotary_dim / 2 cosines, then as many sines, every scaling of the model included."
    ),
    attributes={
        "rotary_dim": Attribute("dimensions that are rotated", required=True),
        "interleaved": Attribute(
            "pairs are (0, 1), (2, 3) ... instead of (i, i + rotary_dim / 2)", False, choices=(False, True)
        ),
        "tail": Attribute("the last dimensions are rotated instead of the first", False, choices=(False, True)),
    },
    reference=build_rope,
    samples=_samples,
    tolerance=POINTWISE,
    weights=("table",),
    mutates=("q", "k"),
    wide_weights=("table",),
)
