"""Experts of static shape: every expert multiplies every token, then each token takes those that it chose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, WeightSpec
from hardpoint_platforms.quant import round_input
from hardpoint_platforms.reference.activation import FUNCTIONS, gate_with


def build_experts(instance: OpInstance) -> Kernel:
    """experts(x[T, H], weights[T, k], ids[T, k], (gate_up, down, gate_up_bias?, down_bias?)) -> [T, H]."""
    attrs = instance.attrs
    on_input = attrs["weight_on_input"]
    into, out_of = (_product(instance.weights[name]) for name in ("gate_up", "down"))

    def hidden(x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        if not attrs["gated"]:
            return FUNCTIONS[attrs["activation"]](x)
        gate, up = (x[..., 0::2], x[..., 1::2]) if attrs["interleaved"] else x.chunk(2, dim=-1)
        return gate_with(gate, up, attrs["activation"], attrs["limit"], attrs["up_offset"])

    def every(x: torch.Tensor, w: Packed) -> torch.Tensor:
        """[T, H] -> [T, E, H] float32."""
        up, down, *biases = w
        h = into(x, up)  # [E, T, 2F]
        h = hidden(h + biases[0][:, None] if biases else h).to(x.dtype)
        out = out_of(h, down)
        out = out + biases[1][:, None] if biases else out
        return out.transpose(0, 1).to(torch.float32)

    def chosen(results: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """results[T, E, H], ids[T, k] -> [T, k, H]."""
        return results.gather(1, ids[..., None].expand(*ids.shape, results.shape[-1]))

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w: Packed) -> torch.Tensor:
        share = weights.to(torch.float32)
        if not on_input:
            return (chosen(every(x, w), ids) * share[..., None]).sum(1).to(x.dtype)
        parts = [
            chosen(every((x * share[:, slot, None]).to(x.dtype), w), ids[:, slot, None]) for slot in range(ids.shape[1])
        ]
        return torch.cat(parts, dim=1).sum(1).to(x.dtype)

    return run


def _product(spec: WeightSpec) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """f(x [..., T, K], weight [E, N, K]) -> [E, T, N] of x's dtype, x rounded as the weight's scheme wants it."""
    rounding = spec.scheme.rounding if spec.scheme else None
    if rounding is None:
        return lambda x, weight: x @ weight.transpose(1, 2)
    return lambda x, weight: (round_input(x, rounding) @ weight.to(torch.float32).transpose(1, 2)).to(x.dtype)
