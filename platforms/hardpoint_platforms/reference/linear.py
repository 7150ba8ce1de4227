"""Linear layers: `torch.nn.functional.linear` on plain weights; quantized ones were dequantized at load.

Where the weight's scheme rounds its input, the input is rounded and the product computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, WeightSpec
from hardpoint_platforms.quant import round_input


def build_linear(instance: OpInstance) -> Kernel:
    """linear(x[..., K], (weight[N, K], bias[N]?)) -> [..., N]."""

    product = product_with(instance.weights["weight"])

    def linear(x: torch.Tensor, w: Packed) -> torch.Tensor:
        return product(x, *w)

    return linear


def product_with(spec: WeightSpec) -> Callable[..., torch.Tensor]:
    """f(x [..., K], weight [N, K], bias [N]?) -> [..., N] of x's dtype, x rounded as the weight's scheme wants it."""
    rounding = spec.scheme.rounding if spec.scheme else None
    if rounding is None:
        return F.linear

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide = None if bias is None else bias.to(torch.float32)
        return F.linear(round_input(x, rounding), weight.to(torch.float32), wide).to(x.dtype)

    return rounded
