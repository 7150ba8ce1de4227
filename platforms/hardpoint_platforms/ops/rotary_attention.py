"""Contract: what stands between the projections of attention, as a block: norms of heads, rotation, paged attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.attention import ATTENTION
from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, OpInstance, Sample, Weight
from hardpoint_platforms.ops.norm import KINDS
from hardpoint_platforms.ops.rotary import ROPE, rope_table
from hardpoint_platforms.ops.samples import SUMS, Source, specs
from hardpoint_platforms.reference.rotary_attention import build_rotary_attention
from hardpoint_platforms.versioning import Version

#: How the samples rotate and norm, one after another: numbers that stay as they are, pairs, place, norm, its weights.
_WAYS: tuple[tuple[int, bool, bool, str | None, tuple[str, ...]], ...] = (
    (0, False, False, None, ()),
    (0, False, False, "rms", ("q_norm", "k_norm")),
    (4, False, False, "rms1p", ("q_norm", "k_norm")),
    (4, True, True, "ln", ("q_norm", "k_norm")),
    (0, True, False, "l2", ()),
    (6, False, True, "rms", ("k_norm",)),
    (6, True, False, None, ()),
)


def attention_in(block: OpInstance) -> OpInstance:
    """The attention that is a part of a `rotary_attention`: of the same place."""
    attrs = {name: block.attrs[name] for name in ATTENTION.attributes}
    return ATTENTION.instance(
        block.where, block.dtype, {n: s for n, s in block.weights.items() if n == "sinks"}, **attrs
    )


def _positions(batch: AttentionBatch) -> torch.Tensor:
    """int64 [T], of each new token in its request; 0 for padding."""
    found = np.zeros(len(batch.slot_mapping[0]), np.int64)
    new = np.diff(batch.query_start)
    for start, count, length in zip(batch.query_start, new, batch.sequence_lengths, strict=False):
        found[start : start + count] = np.arange(length - count, length)
    return torch.from_numpy(found)


def _behind(case: Sample, way: tuple[int, bool, bool, str | None, tuple[str, ...]]) -> Sample:
    """A sample of attention whose queries and keys are normed and rotated first."""
    still, interleaved, tail, norm, normed = way
    attrs, width = case.instance.attrs, case.instance.attrs["head_dim"]
    source = Source(12)
    weights: dict[str, Weight] = {"table": rope_table(64, width - still, scale=1.1 if still else 1.0)}
    weights |= {name: source.normal(width) + (0.0 if norm == "rms1p" else 1.0) for name in normed}
    weights |= case.weights
    told = f"{width - still} of {width} rotated" + (f", {norm}" if norm else "")
    instance = ROTARY_ATTENTION.instance(
        f"{case.instance.where}, {told}",
        case.instance.dtype,
        specs(weights, case.instance.dtype),
        **attrs,
        rotary_dim=width - still,
        interleaved=interleaved,
        tail=tail,
        norm=norm,
        eps=1e-5,
    )

    def make() -> tuple[Any, ...]:
        q, k, v, state, batch = case.make()
        return q, k, v, _positions(batch), state, batch

    return Sample(instance, weights, make)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Those of attention."""
    for case, way in zip(ATTENTION.samples(dtype), cycle(_WAYS), strict=False):
        yield _behind(case, way)


ROTARY_ATTENTION = OpContract(
    name="rotary_attention",
    version=Version(1, 0),
    altitude=Altitude.BLOCK,
    signature=(
        "rotary_attention(q: [T, h, d], k: [T, hk, d], v: [T, hk, dv], positions: int64 [T], state, plan, "
        "w: (table [P, rotary_dim], q_norm [d]?, k_norm [d]?, sinks [h]?)) -> (out [T, h, dv], state)"
    ),
    doc=(
        "attention(rope(norm(q), norm(k)), v): heads of queries and keys are normed where `norm` names a kind, each "
        "by its weight if there is one, then rotated, then stored and attended. Between these steps numbers are of "
        "the activations' dtype. The rules for padding are those of `attention`."
    ),
    attributes={
        **ATTENTION.attributes,
        **ROPE.attributes,
        "norm": Attribute("kind of the norm over each head of q and k, as in `norm`", choices=(None, *KINDS)),
        "eps": Attribute("added under the root of that norm", 1e-6),
    },
    reference=build_rotary_attention,
    samples=_samples,
    tolerance=SUMS,
    weights=("table", "q_norm?", "k_norm?", "sinks?"),
    mutates=("q", "k", "state"),
    decomposition=("norm", "rope", "attention"),
    wide_weights=("table", "q_norm", "k_norm", "sinks"),
)
