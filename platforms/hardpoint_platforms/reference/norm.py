"""Normalization over the last dimension, computed in float32."""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed


def build_norm(instance: OpInstance) -> Kernel:
    """norm(x[..., H], (weight?, bias?)) -> [..., H]."""
    kind, eps = instance.attrs["kind"], instance.attrs["eps"]

    def norm(x: torch.Tensor, w: Packed = ()) -> torch.Tensor:
        return normalize(x, w, kind, eps)

    return norm


def build_add_norm(instance: OpInstance) -> Kernel:
    """add_norm(x[..., H], residual[..., H], w) -> (norm(x + residual), x + residual)."""
    kind, eps = instance.attrs["kind"], instance.attrs["eps"]

    def add_norm(x: torch.Tensor, residual: torch.Tensor, w: Packed = ()) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return normalize(total, w, kind, eps), total

    return add_norm


def normalize(x: torch.Tensor, w: Packed, kind: str, eps: float) -> torch.Tensor:
    """One of the four kinds; a weight of shape [h, d] scales each head of x[..., h, d] by its own row."""
    wide = x.to(torch.float32)
    if kind == "ln":
        wide = wide - wide.mean(-1, keepdim=True)
    squares = wide.square()
    energy = squares.sum(-1, keepdim=True) if kind == "l2" else squares.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(energy + eps)
    if w:
        wide = wide * (w[0] + 1.0 if kind == "rms1p" else w[0])
    if len(w) > 1:
        wide = wide + w[1]
    return wide.to(x.dtype)
