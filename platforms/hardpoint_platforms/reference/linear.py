"""Linear layers: `torch.nn.functional.linear` on plain weights; quantized ones were dequantized at load."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed


def build_linear(instance: OpInstance) -> Kernel:
    """linear(x[..., K], (weight[N, K], bias[N]?)) -> [..., N]."""

    def linear(x: torch.Tensor, w: Packed) -> torch.Tensor:
        return F.linear(x, *w)

    return linear
