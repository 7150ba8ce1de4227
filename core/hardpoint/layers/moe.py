"""A mixture of experts: router, routing, the grouped experts op, and a shared MLP beside them."""

from __future__ import annotations

import torch

from hardpoint.layers.linear import bind_linear, projection
from hardpoint.layers.mlp import mlp
from hardpoint.layers.op import LayerBuilder, Part, cut, join_rows, stack
from hardpoint.layers.shard import after
from hardpoint.models.spec import MoESpec, Names
from hardpoint_platforms.program import Weights


class MoE:
    """x [T, hidden] -> [T, hidden]; a rank's output is that of its experts, or of its part of each: a part of a sum."""

    __slots__ = ("_count", "_dealt", "_experts", "_route", "_router", "_router_dtype", "_shared", "_slot")

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
        shard = build.shard
        self._dealt = shard if shard.count > 1 and shard.whole_experts else None
        self._count = shard.share(spec.experts, "experts") if self._dealt else spec.experts
        weights = _experts(build, experts, hidden, spec, names)
        bound = build.bind(
            "experts",
            experts,
            weights,
            experts=self._count,
            top_k=spec.top_k,
            hidden=hidden,
            intermediate=weights["down"].spec.shape[-1],
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
        if self._dealt is not None:
            # an expert of another rank is the first one here, with no share
            ids, here = self._dealt.own(ids, self._count)
            shares = torch.where(here, shares, 0.0)
        out: torch.Tensor = self._experts(x, shares, ids, weights[self._slot])
        return out if self._shared is None else out + self._shared(x, weights)


def _experts(build: LayerBuilder, path: str, hidden: int, spec: MoESpec, names: Names) -> dict[str, Part]:
    """This rank's part of gate_up [E, 2F, H] and down [E, H, F], which the checkpoint holds stacked or one by one."""
    count, width = spec.experts, spec.intermediate
    gate, up, down = names.gate, names.up, names.down
    experts, mine = range(count), range(width)
    if build.shard.whole_experts:
        experts = build.shard.mine(count, "experts")
    else:
        mine = build.shard.mine(width, "columns of an expert")
    if build.has(f"{path}.gate_up_proj"):
        stacked = cut(build.weight(f"{path}.gate_up_proj", (count, 2 * width, hidden)), -3, [experts])
        downward = cut(build.weight(f"{path}.{down}", (count, hidden, width)), -3, [experts])
        return {"gate_up": cut(stacked, -2, [mine, after(width, mine)]), "down": cut(downward, -1, [mine])}
    for e in set(range(count)) - set(experts):
        for name in (gate, up, down):
            build.leave(f"{path}.{e}.{name}.weight")
    pairs = [
        join_rows([cut(build.weight(f"{path}.{e}.{name}.weight", (width, hidden)), -2, [mine]) for name in (gate, up)])
        for e in experts
    ]
    downs = [cut(build.weight(f"{path}.{e}.{down}.weight", (hidden, width)), -1, [mine]) for e in experts]
    return {"gate_up": stack(pairs), "down": stack(downs)}
