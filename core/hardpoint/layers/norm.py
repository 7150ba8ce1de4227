"""Norms, alone and together with the residual addition before them."""

from __future__ import annotations

import torch

from hardpoint.layers.op import LayerBuilder, Op
from hardpoint.models.spec import NormSpec
from hardpoint_platforms.program import Weights


class Norm:
    """x [..., size] -> the same shape."""

    __slots__ = ("_kernel", "_slot")

    def __init__(self, build: LayerBuilder, path: str, size: int, spec: NormSpec) -> None:
        op = _bind(build, "norm", path, size, spec)
        self._kernel = op.kernel
        self._slot = op.slot

    def __call__(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        return self._kernel(x, weights[self._slot])  # type: ignore[no-any-return]


class FirstNorm(Norm):
    """The first layer's input norm, where nothing has to be added yet. Shaped like `AddNorm`."""

    __slots__ = ()

    def enter(
        self, x: torch.Tensor, residual: torch.Tensor | None, weights: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x), x)."""
        return self._kernel(x, weights[self._slot]), x


class AddNorm:
    """Adds a block's output to the residual stream and norms the sum."""

    __slots__ = ("_kernel", "_slot")

    def __init__(self, build: LayerBuilder, path: str, size: int, spec: NormSpec) -> None:
        op = _bind(build, "add_norm", path, size, spec)
        self._kernel = op.kernel
        self._slot = op.slot

    def enter(
        self, x: torch.Tensor, residual: torch.Tensor | None, weights: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x)."""
        return self._kernel(x, residual, weights[self._slot])  # type: ignore[no-any-return]


def _bind(build: LayerBuilder, op: str, path: str, size: int, spec: NormSpec) -> Op:
    weights = {"weight": build.weight(f"{path}.weight", (size,))}
    if spec.kind == "ln" and build.has(f"{path}.bias"):
        weights["bias"] = build.weight(f"{path}.bias", (size,))
    return build.bind(op, path, weights, kind=spec.kind, eps=spec.eps)
