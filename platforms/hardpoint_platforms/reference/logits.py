"""Projection onto the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed


def build_logits(instance: OpInstance) -> Kernel:
    """logits(hidden[R, H], (weight[V, H], bias[V]?)) -> float32 [R, V]."""
    scale, softcap = instance.attrs["scale"], instance.attrs["softcap"]

    def logits(hidden: torch.Tensor, w: Packed) -> torch.Tensor:
        scores = F.linear(hidden, *w).to(torch.float32)
        if scale != 1.0:
            scores = scores * scale
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    return logits
