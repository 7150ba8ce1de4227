"""Blocks: whole parts of a layer, spelled in the reference's own composites. For tests; the core decomposes blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.reference.activation import gate_with
from hardpoint_platforms.reference.linear import build_linear, product_with
from hardpoint_platforms.reference.norm import normalize


def build_gated_mlp(instance: OpInstance) -> Kernel:
    """gated_mlp(x[..., H], (gate_up[2F, H], down[H, F], gate_up_bias?, down_bias?)) -> [..., H]."""
    kind, limit, offset = (instance.attrs[name] for name in ("kind", "limit", "up_offset"))

    gate_up, down = (product_with(instance.weights[name]) for name in ("gate_up", "down"))

    def gated_mlp(x: torch.Tensor, w: Packed) -> torch.Tensor:
        named = dict(zip(instance.weights, w, strict=True))
        both = gate_up(x, named["gate_up"], named.get("gate_up_bias"))
        gate, up = both.to(torch.float32).chunk(2, dim=-1)
        inner = gate_with(gate, up, kind, limit, offset).to(x.dtype)
        return down(inner, named["down"], named.get("down_bias"))

    return gated_mlp


def build_norm_linear(instance: OpInstance) -> Kernel:
    """norm_linear(x[..., K], residual[..., K], (norm_weight?, norm_bias?, weight[N, K], bias[N]?))
    -> ([..., N], x + residual)."""
    return _behind_norm(instance, build_linear)


def build_norm_gated_mlp(instance: OpInstance) -> Kernel:
    """norm_gated_mlp(x[..., H], residual[..., H], (norm_weight?, norm_bias?, gate_up[2F, H], down[H, F],
    gate_up_bias?, down_bias?)) -> ([..., H], x + residual)."""
    return _behind_norm(instance, build_gated_mlp)


def _behind_norm(instance: OpInstance, build: Callable[[OpInstance], Kernel]) -> Kernel:
    """What `build` makes, behind a residual addition and a norm."""
    kind, eps = instance.attrs["norm_kind"], instance.attrs["eps"]
    behind = {name: spec for name, spec in instance.weights.items() if not name.startswith("norm_")}
    norms, kernel = len(instance.weights) - len(behind), build(replace(instance, weights=behind))

    def both(x: torch.Tensor, residual: torch.Tensor, w: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return kernel(normalize(total, w[:norms], kind, eps), w[norms:]), total

    return both
