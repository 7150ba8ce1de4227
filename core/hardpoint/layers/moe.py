"""A mixture of experts: router, routing, the grouped experts op, and a shared MLP beside them."""

from __future__ import annotations

import torch

from hardpoint.layers.linear import bind_linear, projection
from hardpoint.layers.mlp import mlp
from hardpoint.layers.op import LayerBuilder, Part, join_rows, stack
from hardpoint.models.spec import MoESpec, Names
from hardpoint_platforms.program import Weights


class MoE:
    """x [T, hidden] -> [T, hidden]."""

    __slots__ = ("_experts", "_route", "_router", "_router_dtype", "_shared", "_slot")

    def __init__(self, build: LayerBuilder, path: str, hidden: int, spec: MoESpec, names: Names) -> None:
        dtype = torch.float32 if spec.router_fp32 else build.dtype
        self._router_dtype = dtype
        router = f"{path}.{names.router}"
        self._router = bind_linear(build, projection(build, router, hidden, spec.experts, dtype=dtype), dtype)
        self._route = build.bind(
            "moe_route",
            f"{path}.route",
            dtype=dtype,
            experts=spec.experts,
            top_k=spec.top_k,
            score=spec.score,
            renormalize=spec.renormalize,
            groups=spec.groups,
            top_groups=spec.top_groups,
            group_score=spec.group_score,
            scale=spec.scale,
        ).kernel
        experts = f"{path}.{names.experts}"
        bound = build.bind(
            "experts",
            experts,
            _experts(build, experts, hidden, spec, names),
            experts=spec.experts,
            top_k=spec.top_k,
            hidden=hidden,
            intermediate=spec.intermediate,
            activation=spec.activation,
            gated=True,
        )
        self._experts, self._slot = bound.kernel, bound.slot
        self._shared = None
        if spec.shared is not None:
            self._shared = mlp(build, f"{path}.{names.shared}", hidden, spec.shared, names)

    def __call__(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        logits = self._router(x.to(self._router_dtype), weights)
        shares, ids = self._route(logits, ())
        out: torch.Tensor = self._experts(x, shares, ids, weights[self._slot])
        return out if self._shared is None else out + self._shared(x, weights)


def _experts(build: LayerBuilder, path: str, hidden: int, spec: MoESpec, names: Names) -> dict[str, Part]:
    """gate_up [E, 2F, H] and down [E, H, F], which the checkpoint holds stacked or expert by expert."""
    count, width = spec.experts, spec.intermediate
    gate, up, down = names.gate, names.up, names.down
    if build.has(f"{path}.gate_up_proj"):
        return {
            "gate_up": build.weight(f"{path}.gate_up_proj", (count, 2 * width, hidden)),
            "down": build.weight(f"{path}.{down}", (count, hidden, width)),
        }
    pairs = [
        join_rows([build.weight(f"{path}.{e}.{name}.weight", (width, hidden)) for name in (gate, up)])
        for e in range(count)
    ]
    downs = [build.weight(f"{path}.{e}.{down}.weight", (hidden, width)) for e in range(count)]
    return {"gate_up": stack(pairs), "down": stack(downs)}
