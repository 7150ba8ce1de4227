"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed


def build_embedding(instance: OpInstance) -> Kernel:
    """embedding(ids[T], (weight[V, H],)) -> [T, H], times `scale`."""
    scale = instance.attrs["scale"]
    dtype = instance.dtype

    def embedding(ids: torch.Tensor, w: Packed) -> torch.Tensor:
        rows = F.embedding(ids, w[0]).to(dtype)
        return rows if scale == 1.0 else rows * scale

    return embedding
