"""Launches of kernels that no contract's sample reaches on the host: products of one row."""

from __future__ import annotations

import torch
from hardpoint_torch_gpu.dense import product


def note_products() -> None:
    """A GEMV with and without a bias."""
    x, w = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(64, 4096, dtype=torch.bfloat16)
    product(x, w, None)
    product(x, w, torch.zeros(64, dtype=torch.bfloat16))
