"""Contracts at the highest altitude: parts of a layer that a device may claim whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from hardpoint_platforms.ops.activation import GATE, KIND
from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample, Weight
from hardpoint_platforms.ops.samples import SCHEMES, SUMS, Source, quantized, sample
from hardpoint_platforms.reference.blocks import build_gated_mlp
from hardpoint_platforms.versioning import Version


def _arguments(dtype: torch.dtype, tokens: int, hidden: int, s: Source) -> tuple[torch.Tensor, ...]:
    return (s.normal(tokens, hidden, dtype=dtype),)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    source = Source(6)
    plain: dict[str, Weight] = {"gate_up": source.matrix(96, 40, dtype), "down": source.matrix(40, 48, dtype)}
    biased: dict[str, Weight] = {
        **plain,
        "gate_up_bias": source.normal(96, dtype=dtype),
        "down_bias": source.normal(40, dtype=dtype),
    }
    packed: dict[str, Weight] = {
        "gate_up": quantized(source, (128, 256), SCHEMES["q4_1"]),
        "down": quantized(source, (256, 64), SCHEMES["q8_0"]),
    }
    rounding: dict[str, dict[str, Weight]] = {
        name: {
            "gate_up": quantized(source, (512, 256), SCHEMES[name]),
            "down": quantized(source, (256, 256), SCHEMES[name]),
        }
        for name in ("fp8", "fp8_block", "int8")
    }
    cases = [("plain", 5, plain), ("one token", 1, plain), ("biases", 3, biased), ("quantized", 2, packed)]
    if dtype is torch.float32:  # else the first product's own rounding decides between two codes of the second's input
        cases += [(name, 3, weights) for name, weights in rounding.items()]
    for where, tokens, weights in cases:
        hidden, inner = weights["down"].shape
        yield sample(
            GATED_MLP,
            where,
            dtype,
            partial(_arguments, dtype, tokens, hidden),
            weights,
            hidden=hidden,
            intermediate=inner,
            kind="silu",
        )


GATED_MLP = OpContract(
    name="gated_mlp",
    version=Version(1, 0),
    altitude=Altitude.BLOCK,
    signature=(
        "gated_mlp(x: [..., H], w: (gate_up [2F, H], down [H, F], gate_up_bias [2F]?, down_bias [H]?)) -> [..., H]"
    ),
    doc="down(gated_activation(gate_up(x))): rows [0, F) of gate_up make the gate, rows [F, 2F) the up half.",
    attributes={
        "hidden": Attribute("H", required=True),
        "intermediate": Attribute("F", required=True),
        "kind": KIND,
        **GATE,
    },
    reference=build_gated_mlp,
    samples=_samples,
    tolerance=SUMS,
    weights=("gate_up", "down", "gate_up_bias?", "down_bias?"),
    decomposition=("linear", "gated_activation", "linear"),
)
