"""Contracts at the highest altitude: parts of a layer that a device may claim whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from hardpoint_platforms.ops.activation import GATE, KIND
from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample, Weight
from hardpoint_platforms.ops.linear import LINEAR
from hardpoint_platforms.ops.norm import ATTRIBUTES as NORM
from hardpoint_platforms.ops.samples import SCHEMES, SUMS, Source, quantized, sample
from hardpoint_platforms.reference.blocks import build_gated_mlp, build_norm_gated_mlp, build_norm_linear
from hardpoint_platforms.versioning import Version

#: Schemes that round the input of a product.
_ROUNDING = ("fp8", "fp8_block", "int8")
#: Attributes of a norm in a block: its `kind` under a name of its own.
_NORM = {"norm_kind": NORM["kind"], "eps": NORM["eps"]}
_NORM_WEIGHTS = ("norm_weight", "norm_bias")


class _Case(NamedTuple):
    where: str
    tokens: int
    weights: dict[str, Weight]


def _arguments(
    dtype: torch.dtype, lead: tuple[int, ...], hidden: int, count: int, s: Source
) -> tuple[torch.Tensor, ...]:
    return tuple(s.normal(*lead, hidden, dtype=dtype) for _ in range(count))


def _mlp_cases(dtype: torch.dtype) -> list[_Case]:
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
        for name in _ROUNDING
    }
    cases = [
        _Case("plain", 5, plain),
        _Case("one token", 1, plain),
        _Case("biases", 3, biased),
        _Case("quantized", 2, packed),
    ]
    if dtype is torch.float32:  # else the first product's own rounding decides between two codes of the second's input
        cases += [_Case(name, 3, weights) for name, weights in rounding.items()]
    return cases


def _mlp_sizes(weights: dict[str, Weight]) -> dict[str, int]:
    hidden, inner = weights["down"].shape
    return {"hidden": hidden, "intermediate": inner}


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for where, tokens, weights in _mlp_cases(dtype):
        sizes = _mlp_sizes(weights)
        make = partial(_arguments, dtype, (tokens,), sizes["hidden"], 1)
        yield sample(GATED_MLP, where, dtype, make, weights, **sizes, kind="silu")


def _norm_weights(source: Source, kind: str, size: int) -> dict[str, Weight]:
    """Of a layer norm with a bias, of an l2 norm without a weight, of others with one."""
    if kind == "l2":
        return {}
    weights: dict[str, Weight] = {"norm_weight": source.normal(size, scale=0.3) + (kind != "rms1p")}
    if kind == "ln":
        weights["norm_bias"] = source.normal(size, scale=0.3)
    return weights


def _linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, str, tuple[int, ...], dict[str, Weight]]]:
    """Kind of norm, name, leading dimensions, weights of the product."""
    source = Source(8)
    plain: dict[str, Weight] = {"weight": source.matrix(32, 48, dtype)}
    biased = {**plain, "bias": source.normal(32, dtype=dtype)}
    yield "rms", "plain", (5,), plain
    yield "rms", "one token", (1,), plain
    yield "rms1p", "two leading dimensions", (2, 3), plain
    yield "ln", "biases", (3,), biased
    yield "l2", "without a weight of the norm", (4,), plain
    yield "rms", "quantized", (2,), {"weight": quantized(source, (24, 256), SCHEMES["q4_1"])}
    for name in _ROUNDING if dtype is torch.float32 else ():  # else the norm's rounding decides between two codes
        yield "rms", name, (3,), {"weight": quantized(source, (256, 256), SCHEMES[name])}


def _norm_linear_samples(dtype: torch.dtype) -> Iterator[Sample]:
    source = Source(9)
    for kind, where, lead, weights in _linear_cases(dtype):
        rows, columns = weights["weight"].shape
        yield sample(
            NORM_LINEAR,
            where,
            dtype,
            partial(_arguments, dtype, lead, columns, 2),
            _norm_weights(source, kind, columns) | weights,
            norm_kind=kind,
            eps=1e-5,
            in_features=columns,
            out_features=rows,
            bias="bias" in weights,
        )


def _norm_mlp_samples(dtype: torch.dtype) -> Iterator[Sample]:
    source = Source(10)
    kinds = {"one token": "rms1p", "biases": "ln", "quantized": "l2"}
    for where, tokens, weights in _mlp_cases(dtype):
        sizes, norm = _mlp_sizes(weights), kinds.get(where, "rms")
        make = partial(_arguments, dtype, (tokens,), sizes["hidden"], 2)
        both = _norm_weights(source, norm, sizes["hidden"]) | weights
        yield sample(NORM_GATED_MLP, where, dtype, make, both, norm_kind=norm, eps=1e-5, **sizes, kind="silu")


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

NORM_LINEAR = OpContract(
    name="norm_linear",
    version=Version(1, 0),
    altitude=Altitude.BLOCK,
    signature=(
        "norm_linear(x: [..., K], residual: [..., K], w: (norm_weight [K]?, norm_bias [K]?, weight [N, K], bias [N]?)) "
        "-> ([..., N], new_residual)"
    ),
    doc=(
        "new_residual = x + residual, then linear(norm(new_residual)). Where the weight's scheme rounds its input, the "
        "norm's result is rounded to the activations' dtype first."
    ),
    attributes={**_NORM, **LINEAR.attributes},
    reference=build_norm_linear,
    samples=_norm_linear_samples,
    tolerance=SUMS,
    weights=("norm_weight?", "norm_bias?", "weight", "bias?"),
    mutates=("x", "residual"),
    wide_weights=_NORM_WEIGHTS,
    decomposition=("add_norm", "linear"),
)

NORM_GATED_MLP = OpContract(
    name="norm_gated_mlp",
    version=Version(1, 0),
    altitude=Altitude.BLOCK,
    signature=(
        "norm_gated_mlp(x: [..., H], residual: [..., H], w: (norm_weight [H]?, norm_bias [H]?, gate_up [2F, H], "
        "down [H, F], gate_up_bias [2F]?, down_bias [H]?)) -> ([..., H], new_residual)"
    ),
    doc="new_residual = x + residual, then gated_mlp(norm(new_residual)); rounded between them as in `norm_linear`.",
    attributes={**_NORM, **GATED_MLP.attributes},
    reference=build_norm_gated_mlp,
    samples=_norm_mlp_samples,
    tolerance=SUMS,
    weights=("norm_weight?", "norm_bias?", *GATED_MLP.weights),
    mutates=("x", "residual"),
    wide_weights=_NORM_WEIGHTS,
    decomposition=("add_norm", "gated_mlp"),
)
