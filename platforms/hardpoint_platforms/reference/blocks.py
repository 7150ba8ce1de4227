"""Blocks: whole parts of a layer, spelled in the reference's own composites. For tests; the core decomposes blocks."""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.reference.activation import gate_with
from hardpoint_platforms.reference.linear import product_with


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
