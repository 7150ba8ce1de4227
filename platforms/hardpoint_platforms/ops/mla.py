"""Contract: multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hardpoint_platforms.ops.attention import PAGED
from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample
from hardpoint_platforms.ops.samples import SCHEMES, SUMS, PagedRows, Source, quantized, sample
from hardpoint_platforms.reference.mla import build_mla_attention
from hardpoint_platforms.versioning import Version


def _case(dtype: torch.dtype, where: str, rows: PagedRows, heads: int = 4, packed: bool = False) -> Sample:
    nope, rope, value = 24, 8, 16
    latent = 256 if packed else 32

    def make(s: Source) -> tuple[Any, ...]:
        tokens = rows.num_tokens
        layer = (
            s.normal(rows.num_pages, rows.page_tokens, 1, latent, dtype=dtype),
            s.normal(rows.num_pages, rows.page_tokens, 1, rope, dtype=dtype),
        )
        return (
            s.normal(tokens, heads, nope, dtype=dtype),
            s.normal(tokens, heads, rope, dtype=dtype),
            s.normal(tokens, latent, dtype=dtype),
            s.normal(tokens, rope, dtype=dtype),
            (layer,),
            rows.batch(),
        )

    source = Source(8)
    size = (heads * (nope + value), latent)
    weight = quantized(source, size, SCHEMES["q8_0"]) if packed else source.matrix(*size, dtype)
    return sample(
        MLA_ATTENTION,
        where,
        dtype,
        make,
        {"kv_b": weight},
        heads=heads,
        nope_dim=nope,
        rope_dim=rope,
        v_head_dim=value,
        latent_dim=latent,
        scale=(nope + rope) ** -0.5,
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield _case(dtype, "prefill", PagedRows(((0, 5), (0, 1))))
    yield _case(dtype, "decode", PagedRows(((6, 1), (13, 1))))
    yield _case(dtype, "mixed with padding", PagedRows(((9, 1), (0, 6), (4, 5)), extra_tokens=2, extra_requests=1))
    yield _case(dtype, "one head", PagedRows(((3, 1), (2, 4))), heads=1)
    yield _case(dtype, "q8_0", PagedRows(((3, 1), (2, 4))), packed=True)


MLA_ATTENTION = OpContract(
    name="mla_attention",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature=(
        "mla_attention(q_nope: [T, h, dn], q_rope: [T, h, dr], latent: [T, c], k_rope: [T, dr], state, plan, "
        "w: (kv_b [h * (dn + dv), c],)) -> (out [T, h, dv], state)"
    ),
    doc=(
        "Attention over a compressed cache (DeepSeek-V2, 2024): latent and rope key of each token are stored, the "
        "latent after its norm, the rope key rotated. kv_b holds per head dn rows that expand the latent into the key "
        "and dv rows for the value; the key of every head ends in the shared rope key. Causal, softmax in float32. "
        "The rules for padding are those of `attention`."
    ),
    attributes={
        "heads": Attribute("query heads", required=True),
        "nope_dim": Attribute("dn, part of the key without position", required=True),
        "rope_dim": Attribute("dr, rotated part of the key", required=True),
        "v_head_dim": Attribute("dv", required=True),
        "latent_dim": Attribute("c", required=True),
        "scale": Attribute("factor on the scores", required=True),
        **PAGED,
    },
    reference=build_mla_attention,
    samples=_samples,
    tolerance=SUMS,
    weights=("kv_b",),
    mutates=("state",),
)
