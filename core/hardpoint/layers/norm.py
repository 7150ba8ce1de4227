"""Norms, alone and together with the residual addition before them, and with what follows where a device has both."""

from __future__ import annotations

import torch

from hardpoint.layers.op import Block, LayerBuilder, Op, Part
from hardpoint.models.spec import NormSpec
from hardpoint_platforms.program import Weights


class Norm:
    """x [..., size] -> the same shape."""

    __slots__ = ("_kernel", "_slot")

    def __init__(self, build: LayerBuilder, path: str, size: int, spec: NormSpec) -> None:
        op = build.bind("norm", path, _weights(build, path, size, spec), kind=spec.kind, eps=spec.eps)
        self._kernel = op.kernel
        self._slot = op.slot

    def __call__(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        return self._kernel(x, weights[self._slot])  # type: ignore[no-any-return]


class FirstNorm(Norm):
    """The first layer's input norm, where nothing has to be added yet. Shaped like `AddNorm`, but always on its own."""

    __slots__ = ()

    def claim(self, build: LayerBuilder, behind: Block) -> bool:
        """False: blocks begin with an addition."""
        return False

    def bind(self, build: LayerBuilder) -> FirstNorm:
        """Nothing is left to do."""
        return self

    def enter(
        self, x: torch.Tensor, residual: torch.Tensor | None, weights: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x), x)."""
        return self._kernel(x, weights[self._slot]), x


class AddNorm:
    """Adds a block's output to the residual stream and norms the sum.

    Not bound when it is made: a device may have what follows in one op with it. So that asks first (`claim`), and binds
    the norm alone where nobody takes both (`bind`).
    """

    __slots__ = ("_kernel", "_path", "_slot", "_spec", "_weights")

    def __init__(self, build: LayerBuilder, path: str, size: int, spec: NormSpec) -> None:
        self._path = path
        self._spec = spec
        self._weights = _weights(build, path, size, spec)

    def claim(self, build: LayerBuilder, behind: Block) -> bool:
        """Become one op with what follows; False where nobody takes both.

        After that what follows has nothing left to do: `enter` gives what it would (`done`).
        """
        named = {f"norm_{name}": part for name, part in self._weights.items()}
        attrs = {"norm_kind": self._spec.kind, "eps": self._spec.eps, **behind.attrs}
        parts = (("add_norm", self._path), (behind.op, behind.where), *behind.parts)
        bound = build.claim(Block(f"norm_{behind.op}", behind.where, {**named, **behind.weights}, attrs, parts))
        if bound is not None:
            self._settle(bound)
        return bound is not None

    def bind(self, build: LayerBuilder) -> AddNorm:
        """Bind the norm alone."""
        self._settle(build.bind("add_norm", self._path, self._weights, kind=self._spec.kind, eps=self._spec.eps))
        return self

    def _settle(self, op: Op) -> None:
        self._kernel = op.kernel
        self._slot = op.slot
        self._weights = {}  # the book loads them

    def enter(
        self, x: torch.Tensor, residual: torch.Tensor | None, weights: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x); of a block what follows the norm makes of it, and the sum."""
        return self._kernel(x, residual, weights[self._slot])  # type: ignore[no-any-return]


#: What stands before attention or a feed-forward block.
Entry = FirstNorm | AddNorm


def done(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """What follows a norm that became one op with it."""
    return x


def _weights(build: LayerBuilder, path: str, size: int, spec: NormSpec) -> dict[str, Part]:
    weights = {"weight": build.weight(f"{path}.weight", (size,))}
    if spec.kind == "ln" and build.has(f"{path}.bias"):
        weights["bias"] = build.weight(f"{path}.bias", (size,))
    return weights
