"""Activation functions, plain and gated, computed in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
}


def build_activation(instance: OpInstance) -> Kernel:
    """activation(x) -> the same shape."""
    function = FUNCTIONS[instance.attrs["kind"]]

    def activation(x: torch.Tensor) -> torch.Tensor:
        return function(x.to(torch.float32)).to(x.dtype)

    return activation


def build_gated_activation(instance: OpInstance) -> Kernel:
    """gated_activation(x[..., 2F]) -> [..., F]: activation of the first half times the second."""
    kind, limit, offset = (instance.attrs[name] for name in ("kind", "limit", "up_offset"))

    def gated_activation(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.to(torch.float32).chunk(2, dim=-1)
        return gate_with(gate, up, kind, limit, offset).to(x.dtype)

    return gated_activation


def gate_with(gate: torch.Tensor, up: torch.Tensor, kind: str, limit: float | None, offset: float) -> torch.Tensor:
    """activation(min(gate, limit)) * (clamp(up, -limit, limit) + offset)."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return FUNCTIONS[kind](gate) * (up + offset if offset else up)
