"""Contracts: mixture of experts. Routing chooses, `experts` computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hardpoint_platforms.ops.activation import GATE, KINDS
from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample, Tolerance, Weight
from hardpoint_platforms.ops.samples import SCHEMES, SUMS, Source, quantized, sample
from hardpoint_platforms.reference.moe import build_experts, build_moe_route
from hardpoint_platforms.versioning import Version

_FLAG = (False, True)


def _route_samples(dtype: torch.dtype) -> Iterator[Sample]:
    cases: tuple[tuple[str, bool, dict[str, Any]], ...] = (
        ("softmax", False, {"score": "softmax"}),
        ("softmax, renormalized", False, {"score": "softmax", "renormalize": True}),
        ("top-k then softmax", False, {"score": "topk_softmax"}),
        ("top-k then sigmoid", False, {"score": "topk_sigmoid", "top_k": 1}),
        ("sigmoid with a bias", True, {"score": "sigmoid", "renormalize": True, "scale": 2.5}),
        ("groups by maximum", False, {"score": "softmax", "groups": 4, "top_groups": 2, "scale": 16.0}),
        (
            "groups by the best two, bias",
            True,
            {"score": "sigmoid", "groups": 4, "top_groups": 2, "group_score": "top2", "renormalize": True},
        ),
        ("every expert", False, {"score": "softmax", "top_k": 16}),
    )
    for where, bias, attrs in cases:
        weights = {"bias": Source(12).normal(16, scale=0.3)} if bias else {}
        full = {"experts": 16, "top_k": 3, **attrs}
        yield sample(MOE_ROUTE, where, dtype, lambda s: (s.normal(6, 16, dtype=dtype),), weights, **full)
    yield sample(
        MOE_ROUTE,
        "equal logits",
        dtype,
        lambda s: (torch.zeros(2, 8, dtype=dtype),),
        experts=8,
        top_k=3,
        score="softmax",
    )


def _expert_weights(dtype: torch.dtype, gated: bool, bias: bool) -> dict[str, Weight]:
    source, experts, hidden, inner = Source(13), 6, 32, 24
    rows = 2 * inner if gated else inner
    weights: dict[str, Weight] = {
        "gate_up": source.normal(experts, rows, hidden, dtype=dtype, scale=hidden**-0.5),
        "down": source.normal(experts, hidden, inner, dtype=dtype, scale=inner**-0.5),
    }
    if bias:
        weights["gate_up_bias"] = source.normal(experts, rows, dtype=dtype)
        weights["down_bias"] = source.normal(experts, hidden, dtype=dtype)
    return weights


def _experts_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def case(where: str, weights: dict[str, Weight], tokens: int = 9, **attrs: Any) -> Sample:
        experts, hidden, inner = weights["down"].shape
        top_k = attrs.pop("top_k", 2)
        some = attrs.pop("some", experts)  # only these get tokens

        def make(s: Source) -> tuple[Any, ...]:
            ids = torch.stack([s.integers(0, some, top_k) for _ in range(tokens)])
            return s.normal(tokens, hidden, dtype=dtype), s.uniform(tokens, top_k), ids

        full = {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": inner, **attrs}
        return sample(EXPERTS, where, dtype, make, weights, **full)

    plain = _expert_weights(dtype, True, False)
    yield case("plain", plain)
    yield case("one token", plain, tokens=1)
    yield case("empty experts", plain, some=2)
    yield case("all tokens to one expert", plain, some=1, top_k=1)
    yield case("not gated", _expert_weights(dtype, False, False), gated=False, activation="relu2")
    yield case("weight on the input", plain, top_k=1, weight_on_input=True)
    yield case(
        "interleaved, biases, limit",
        _expert_weights(dtype, True, True),
        activation="gelu_quick",
        interleaved=True,
        limit=7.0,
        up_offset=1.0,
    )
    source = Source(14)
    packed: dict[str, Weight] = {
        "gate_up": quantized(source, (4, 64, 256), SCHEMES["q4_k"]),
        "down": quantized(source, (4, 256, 32), SCHEMES["q8_0"]),
    }
    yield case("quantized", packed)


MOE_ROUTE = OpContract(
    name="moe_route",
    version=Version(1, 0),
    altitude=Altitude.PRIMITIVE,
    signature="moe_route(logits: [T, E], w: (bias [E]?,) = ()) -> (weights: float32 [T, k], ids: int64 [T, k])",
    doc=(
        "Choose k experts per token and weigh them, in float32. Scores are softmax or sigmoid of all logits, or of "
        "the k chosen ones (topk_...). A bias is added for the choice alone. With groups, only experts of the best "
        "top_groups groups can be chosen. Of equals the lower id comes first."
    ),
    attributes={
        "experts": Attribute("E", required=True),
        "top_k": Attribute("experts per token", required=True),
        "score": Attribute(
            "how logits become weights", "softmax", choices=("softmax", "sigmoid", "topk_softmax", "topk_sigmoid")
        ),
        "renormalize": Attribute("weights of a token are divided by their sum", False, choices=_FLAG),
        "groups": Attribute("equal groups of neighbouring experts", 1),
        "top_groups": Attribute("groups that may be chosen from", 1),
        "group_score": Attribute(
            "a group's quality: its best score, or the sum of its best two", "max", choices=("max", "top2")
        ),
        "scale": Attribute("factor on the weights", 1.0),
    },
    reference=build_moe_route,
    samples=_route_samples,
    tolerance=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), Tolerance(1e-6, 1e-5)),
    weights=("bias?",),
    wide_weights=("bias",),
)

EXPERTS = OpContract(
    name="experts",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature=(
        "experts(x: [T, H], weights: float32 [T, k], ids: int64 [T, k], "
        "w: (gate_up [E, 2F, H], down [E, H, F], gate_up_bias [E, 2F]?, down_bias [E, H]?)) -> [T, H]"
    ),
    doc=(
        "Sum over a token's experts of weight * down(activation(gate) * up). Without gating gate_up is [E, F, H]. Both "
        "biases are there, or none."
    ),
    attributes={
        "experts": Attribute("E, those of this rank", required=True),
        "top_k": Attribute("experts per token", required=True),
        "hidden": Attribute("H", required=True),
        "intermediate": Attribute("F", required=True),
        "activation": Attribute("as `kind` of `activation`", "silu", choices=KINDS),
        "gated": Attribute("whether gate_up makes a gate and an up half", True, choices=_FLAG),
        "interleaved": Attribute("gate and up rows alternate instead of gate first", False, choices=_FLAG),
        **GATE,
        "weight_on_input": Attribute("the token is weighed before the experts, not after", False, choices=_FLAG),
    },
    reference=build_experts,
    samples=_experts_samples,
    tolerance=SUMS,
    weights=("gate_up", "down", "gate_up_bias?", "down_bias?"),
)
