"""Low-rank adapters, one of several per token."""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed


def build_lora(instance: OpInstance) -> Kernel:
    """lora(y[T, N], x[T, K], slots[T], (a[S, r, K], b[S, N, r])) -> y + b[slot] a[slot] x."""

    def lora(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, w: Packed) -> torch.Tensor:
        down, up = w
        # all adapters for all tokens, then the foreign ones are cut: no shape depends on the slots
        inner = torch.einsum("tk,srk->tsr", x, down)
        own = slots[:, None] == torch.arange(down.shape[0], device=x.device)
        inner = torch.where(own[..., None], inner, 0.0).to(x.dtype)
        return y + torch.einsum("tsr,snr->tn", inner, up).to(y.dtype)

    return lora
