"""Rotary position embedding from a table of cosines and sines."""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed


def build_rope(instance: OpInstance) -> Kernel:
    """rope(q[T, h, d], k[T, hk, d], positions[T], (table[P, rotary_dim],)) -> (q, k)."""
    rotary_dim: int = instance.attrs["rotary_dim"]
    interleaved, tail = instance.attrs["interleaved"], instance.attrs["tail"]

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        start = x.shape[-1] - rotary_dim if tail else 0
        turned = x[..., start : start + rotary_dim].to(torch.float32)
        if interleaved:
            even, odd = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
        else:
            low, high = turned.chunk(2, dim=-1)
            turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        turned = turned.to(x.dtype)
        if rotary_dim == x.shape[-1]:
            return turned
        return torch.cat((x[..., :start], turned, x[..., start + rotary_dim :]), dim=-1)

    def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, w: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = w[0].index_select(0, positions)[:, None].chunk(2, dim=-1)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return rope
