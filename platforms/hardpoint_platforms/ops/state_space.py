"""Contracts: mixers with a recurrent state: short convolution, Mamba-2, gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hardpoint_platforms.ops.attention import PAGED
from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample
from hardpoint_platforms.ops.samples import SUMS, PagedRows, Source, sample
from hardpoint_platforms.reference.state_space import build_conv_state, build_gated_delta, build_ssm_scan
from hardpoint_platforms.versioning import Version

_STATE = {**PAGED, "part": Attribute("which tensor of the pool layer holds this op's state", 0)}
_STATE_DOC = (
    " A request's state lies at token 0 of the first page of its table in `group`, {layout}; it counts as zero where "
    "the request has nothing computed before this step."
)

_BATCHES = {
    "prefill": PagedRows(((0, 5), (0, 70))),
    "continued": PagedRows(((5, 9), (64, 67))),
    "decode": PagedRows(((4, 1), (0, 1), (30, 1))),
    "mixed with padding": PagedRows(((7, 1), (0, 6), (3, 2)), extra_tokens=2, extra_requests=1),
}


def _state(s: Source, rows: PagedRows, heads: int, width: int) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Pool layer 0 with an unused part and the state."""
    other = torch.zeros(rows.num_pages, rows.page_tokens, 1, 1)
    return ((other, s.normal(rows.num_pages, rows.page_tokens, heads, width, scale=0.5)),)


def _conv_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for where, rows in _BATCHES.items():
        bias = where != "decode"
        weights = {"weight": Source(15).normal(10, 4)}
        if bias:
            weights["bias"] = Source(16).normal(10)

        def make(s: Source, r: PagedRows = rows) -> tuple[Any, ...]:
            return s.normal(r.num_tokens, 10, dtype=dtype), _state(s, r, 3, 10), r.batch()

        attrs: dict[str, Any] = {"channels": 10, "kernel": 4, "activation": "silu" if bias else None, "part": 1}
        yield sample(CONV_STATE, where, dtype, make, weights, **attrs)


def _ssm_samples(dtype: torch.dtype) -> Iterator[Sample]:
    heads, groups, width, size = 4, 2, 8, 6
    source = Source(17)
    least = {"a": -source.uniform(heads, low=0.3, high=8.0)}
    full = {**least, "d": source.normal(heads), "dt_bias": source.normal(heads)}
    for where, rows in _BATCHES.items():

        def make(s: Source, r: PagedRows = rows) -> tuple[Any, ...]:
            tokens = r.num_tokens
            return (
                s.normal(tokens, heads, width, dtype=dtype),
                s.normal(tokens, heads, dtype=dtype),
                s.normal(tokens, groups, size, dtype=dtype),
                s.normal(tokens, groups, size, dtype=dtype),
                _state(s, r, heads, width * size),
                r.batch(),
            )

        yield sample(
            SSM_SCAN,
            where,
            dtype,
            make,
            least if where == "decode" else full,
            heads=heads,
            head_dim=width,
            groups=groups,
            state_dim=size,
            part=1,
            dt_softplus=where != "decode",
            dt_min=0.0 if where != "decode" else 0.01,
            dt_max=0.8 if where == "continued" else float("inf"),
        )


def _delta_samples(dtype: torch.dtype) -> Iterator[Sample]:
    heads, k_heads, k_dim, v_dim = 4, 2, 8, 6
    for where, rows in _BATCHES.items():

        def make(s: Source, r: PagedRows = rows) -> tuple[Any, ...]:
            tokens = r.num_tokens
            return (
                s.normal(tokens, k_heads, k_dim, dtype=dtype),
                s.normal(tokens, k_heads, k_dim, dtype=dtype),
                s.normal(tokens, heads, v_dim, dtype=dtype),
                -s.uniform(tokens, heads, high=1.5),
                s.uniform(tokens, heads),
                _state(s, r, heads, k_dim * v_dim),
                r.batch(),
            )

        yield sample(
            GATED_DELTA,
            where,
            dtype,
            make,
            heads=heads,
            k_heads=k_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            scale=k_dim**-0.5,
            l2norm=where != "decode",
            part=1,
        )


CONV_STATE = OpContract(
    name="conv_state",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature="conv_state(x: [T, C], state, plan, w: (weight [C, k], bias [C]?)) -> (y [T, C], state)",
    doc="Causal depthwise convolution over each request's tokens; the state is its last k - 1 inputs."
    + _STATE_DOC.format(layout="[k - 1, C], oldest first"),
    attributes={
        "channels": Attribute("C", required=True),
        "kernel": Attribute("k, at least 2", required=True),
        "activation": Attribute("silu after the sum, or None", choices=(None, "silu")),
        **_STATE,
    },
    reference=build_conv_state,
    samples=_conv_samples,
    tolerance=SUMS,
    weights=("weight", "bias?"),
    mutates=("state",),
    wide_weights=("weight", "bias"),
)

SSM_SCAN = OpContract(
    name="ssm_scan",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature=(
        "ssm_scan(x: [T, h, p], dt: [T, h], b: [T, g, n], c: [T, g, n], state, plan, "
        "w: (a [h], d [h]?, dt_bias [h]?)) -> (y [T, h, p], state)"
    ),
    doc=(
        "Mamba-2 (Dao and Gu 2024), per head: dt = clamp(softplus(dt + dt_bias)), S = exp(dt a) S + dt x b^T, "
        "y = S c + d x; a is negative. Heads share b and c in groups of neighbours. Computed in float32."
    )
    + _STATE_DOC.format(layout="[h, p * n]"),
    attributes={
        "heads": Attribute("h", required=True),
        "head_dim": Attribute("p", required=True),
        "groups": Attribute("g; divides h", required=True),
        "state_dim": Attribute("n", required=True),
        "dt_softplus": Attribute("whether softplus is applied to dt", True, choices=(False, True)),
        "dt_min": Attribute("lower bound of dt", 0.0),
        "dt_max": Attribute("upper bound of dt", float("inf")),
        **_STATE,
    },
    reference=build_ssm_scan,
    samples=_ssm_samples,
    tolerance=SUMS,
    weights=("a", "d?", "dt_bias?"),
    mutates=("state",),
    wide_weights=("a", "d", "dt_bias"),
)

GATED_DELTA = OpContract(
    name="gated_delta",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature=(
        "gated_delta(q: [T, hk, dk], k: [T, hk, dk], v: [T, h, dv], decay: [T, h], beta: [T, h], state, plan) "
        "-> (out [T, h, dv], state)"
    ),
    doc=(
        "Gated delta rule (Yang et al. 2024), per head: S = exp(decay) S, u = beta (v - S^T k), S = S + k u^T, "
        "out = S^T q scale. decay <= 0. Heads share q and k in groups of neighbours. Computed in float32."
    )
    + _STATE_DOC.format(layout="[h, dk * dv]"),
    attributes={
        "heads": Attribute("h", required=True),
        "k_heads": Attribute("hk; divides h", required=True),
        "k_dim": Attribute("dk", required=True),
        "v_dim": Attribute("dv", required=True),
        "scale": Attribute("factor on q", required=True),
        "l2norm": Attribute("q and k are divided by their length first (eps 1e-6)", True, choices=(False, True)),
        **_STATE,
    },
    reference=build_gated_delta,
    samples=_delta_samples,
    tolerance=SUMS,
    mutates=("state",),
)
