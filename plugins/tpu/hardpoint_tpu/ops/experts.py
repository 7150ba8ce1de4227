"""Experts as one ragged product: tokens sorted by expert, each expert's rows by its own weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.quant import QuantTensor, round_input
from hardpoint_platforms.reference.activation import FUNCTIONS, gate_with
from hardpoint_tpu.kernels_table import TpuProvider
from hardpoint_tpu.ops.quantized import unpacked
from hardpoint_tpu.runtime import lifted


class RaggedExperts(TpuProvider):
    """`experts` over jax.lax.ragged_dot. Quantized weights stay so and become numbers inside the program."""

    name = "ragged"

    def supports(self, instance: OpInstance) -> Support:
        schemes = sorted({spec.scheme.name for spec in instance.weights.values() if spec.scheme is not None})
        return Support(True, f"ragged product{f', {schemes} stay quantized' if schemes else ''}")

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        packed: list[torch.Tensor] = []
        for name in instance.weights:
            weight = weights[name]
            if isinstance(weight, QuantTensor):
                parts = (weight.values, weight.scales, weight.offsets, weight.super_scales, weight.super_offsets)
                packed += [part for part in (*parts, weight.codebook) if part is not None]
            else:
                packed.append(weight.to(instance.dtype))
        return tuple(packed)

    def build(self, instance: OpInstance) -> Kernel:
        return self.kernels.bind(self, instance, lambda placed: _experts(placed, self.runtime.wrap))


def _experts(instance: OpInstance, wrap: Callable[[Any], torch.Tensor]) -> Kernel:
    attrs = instance.attrs
    count, on_input = attrs["experts"], attrs["weight_on_input"]
    ragged = lifted(_ragged, wrap)

    def numbers(packed: Packed) -> dict[str, torch.Tensor]:
        """Weights by name, [E, N, K] each, and biases [E, N]."""
        found = {}
        for name, spec in instance.weights.items():
            if spec.scheme is None:
                found[name], packed = packed[0], packed[1:]
            else:
                weight, packed = unpacked(spec, packed)
                found[name] = weight.dequantize(torch.float32 if spec.scheme.rounding else instance.dtype)
        return found

    def product(name: str, rows: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        scheme = instance.weights[name].scheme
        rounding = scheme.rounding if scheme is not None else None
        rows = rows if rounding is None else round_input(rows, rounding)
        return ragged(rows.to(weight.dtype), weight, sizes)

    def hidden(x: torch.Tensor) -> torch.Tensor:
        if not attrs["gated"]:
            return FUNCTIONS[attrs["activation"]](x)
        gate, up = (x[..., 0::2], x[..., 1::2]) if attrs["interleaved"] else x.chunk(2, dim=-1)
        return gate_with(gate, up, attrs["activation"], attrs["limit"], attrs["up_offset"])

    def experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w: Packed) -> torch.Tensor:
        named, top_k = numbers(w), ids.shape[1]
        owners, order = ids.flatten().sort(stable=True)
        sizes = (ids.flatten()[:, None] == torch.arange(count, device=x.device)).sum(0)
        share = weights.flatten().index_select(0, order)[:, None].to(torch.float32)
        rows = x.index_select(0, order // top_k)
        rows = (rows * share).to(x.dtype) if on_input else rows
        h = product("gate_up", rows, named["gate_up"], sizes)
        h = h + named["gate_up_bias"].index_select(0, owners) if "gate_up_bias" in named else h
        out = product("down", hidden(h).to(x.dtype), named["down"], sizes)
        out = out + named["down_bias"].index_select(0, owners) if "down_bias" in named else out
        out = out if on_input else out * share
        # back in the order of the tokens, each with its experts side by side
        back = order.sort().indices
        return out.index_select(0, back).reshape(x.shape[0], top_k, -1).sum(1).to(x.dtype)

    return experts


def _ragged(rows: Any, weight: Any, sizes: Any) -> Any:
    """float32 [M, N]: rows [M, K], the first sizes[0] of them by weight[0] [N, K], and so on."""
    exact = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jax.lax.ragged_dot(
        rows, jnp.swapaxes(weight, 1, 2), sizes.astype(jnp.int32), precision=exact, preferred_element_type=jnp.float32
    )
