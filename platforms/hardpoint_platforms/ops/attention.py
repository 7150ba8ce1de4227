"""Contract: paged attention, one call that stores the new keys and values and attends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample
from hardpoint_platforms.ops.samples import SUMS, PagedRows, Source, sample
from hardpoint_platforms.reference.attention import build_attention
from hardpoint_platforms.versioning import Version

#: Where a paged op finds its state; shared by every contract that has one.
PAGED = {
    "group": Attribute("cache group whose page tables it reads", 0),
    "pool_layer": Attribute("its layer of the pool", 0),
}


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slopes of ALiBi (Press et al. 2021) for a whole model of `heads` heads."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return tuple(slopes)


@dataclass(frozen=True)
class _Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16


def _case(dtype: torch.dtype, where: str, rows: PagedRows, shape: _Shape = _Shape(), **attrs: Any) -> Sample:
    def make(s: Source) -> tuple[Any, ...]:
        tokens = rows.num_tokens
        cache = [
            s.normal(rows.num_pages, rows.page_tokens, shape.kv_heads, width, dtype=dtype)
            for width in (shape.head_dim, shape.v_head_dim)
        ]
        for part in cache:
            part[0] = 60.0  # nobody's page: what is read from it must not count
        return (
            s.normal(tokens, shape.heads, shape.head_dim, dtype=dtype),
            s.normal(tokens, shape.kv_heads, shape.head_dim, dtype=dtype),
            s.normal(tokens, shape.kv_heads, shape.v_head_dim, dtype=dtype),
            (tuple(torch.zeros_like(part) for part in cache), tuple(cache)),
            rows.batch(),
        )

    weights = {"sinks": Source(9).normal(shape.heads)} if attrs.get("sinks") else None
    return sample(
        ATTENTION,
        where,
        dtype,
        make,
        weights,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        scale=attrs.pop("scale", shape.head_dim**-0.5),
        pool_layer=1,
        **attrs,
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    mixed = PagedRows(((9, 1), (0, 1), (16, 1), (0, 7), (5, 6)), extra_tokens=3, extra_requests=2)
    yield _case(dtype, "prefill", PagedRows(((0, 5), (0, 9))))
    yield _case(dtype, "chunk of a longer prompt", PagedRows(((10, 7), (4, 4))))
    yield _case(dtype, "decode", PagedRows(((3, 1), (11, 1), (0, 1))))
    yield _case(dtype, "one token", PagedRows(((0, 1),)))
    yield _case(dtype, "mixed with padding", mixed)
    yield _case(dtype, "prefill before decode", PagedRows(((0, 6), (7, 1), (2, 3), (1, 1))))
    yield _case(dtype, "padding only", PagedRows((), extra_tokens=4, extra_requests=2))
    yield _case(dtype, "page of 16", PagedRows(((20, 1), (0, 18), (31, 1)), page_tokens=16, extra_tokens=1))
    yield _case(dtype, "one kv head", mixed, _Shape(6, 1, 16, 16))
    yield _case(dtype, "no sharing, odd sizes", mixed, _Shape(3, 3, 20, 12))
    yield _case(dtype, "scale", mixed, scale=0.5)
    yield _case(dtype, "window", mixed, window=5)
    yield _case(dtype, "window of one", mixed, window=1)
    slid = PagedRows(((30, 1), (22, 6), (3, 1)), windows=(None, 6), extra_tokens=1)
    yield _case(dtype, "second group, pages slid out of the window", slid, window=6, group=1)
    yield _case(dtype, "softcap", mixed, softcap=2.0)
    yield _case(dtype, "sinks", mixed, sinks=True)
    yield _case(dtype, "sinks and window", mixed, _Shape(8, 2, 16, 16), sinks=True, window=4)
    yield _case(dtype, "alibi", mixed, _Shape(6, 3, 16, 16), alibi=alibi_slopes(6))


ATTENTION = OpContract(
    name="attention",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature=(
        "attention(q: [T, h, d], k: [T, hk, d], v: [T, hk, dv], state, plan, w: (sinks [h]?,) = ()) "
        "-> (out [T, h, dv], state)"
    ),
    doc=(
        "Store k and v at the batch's slots, then attend causally over each request's pages, softmax in float32. "
        "Score: softcap * tanh(scale * q.k / softcap), plus alibi slope * (key position - query position). Rows of "
        "padding return anything finite and change no page but page 0. Prefill, decode, and mixtures alike."
    ),
    attributes={
        "heads": Attribute("query heads", required=True),
        "kv_heads": Attribute("heads of keys and values; divides `heads`", required=True),
        "head_dim": Attribute("size of queries and keys", required=True),
        "v_head_dim": Attribute("size of values", required=True),
        "scale": Attribute("factor on q.k", required=True),
        **PAGED,
        "window": Attribute("tokens a query looks back, itself included; None for all"),
        "softcap": Attribute("bound of the scores, None for none"),
        "sinks": Attribute(
            "a learned logit per head that takes weight and carries no value", False, choices=(False, True)
        ),
        "alibi": Attribute("slope of each of these heads, or None"),
    },
    reference=build_attention,
    samples=_samples,
    tolerance=SUMS,
    weights=("sinks?",),
    mutates=("state",),
    wide_weights=("sinks",),
)
