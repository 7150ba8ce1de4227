"""Providers whose first product takes an input that was rounded before, and the blocks in which a norm makes that."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.quant import Rounding
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.norm_round import norm_round, refusal
from hardpoint_torch_gpu.kernels.round_input import Rounded, round_rows

#: By op the weight that its input is multiplied by.
_FIRST = {"linear": "weight", "gated_mlp": "gate_up"}
#: Weights and attributes of the norm in a block.
_NORMS, _ATTRS = ("norm_weight", "norm_bias"), ("norm_kind", "eps")


def rounding_of(instance: OpInstance) -> Rounding | None:
    """Of the op's input."""
    scheme = instance.weights[_FIRST[instance.op]].scheme
    return None if scheme is None else scheme.rounding


class TakesRounded(OpProvider):
    """A provider of `linear` or `gated_mlp` that multiplies 8-bit numbers, who ever made them of its input."""

    @abstractmethod
    def against(self, instance: OpInstance) -> str:
        """Why it does not; "" where it does."""

    @abstractmethod
    def of_rounded(self, instance: OpInstance) -> Callable[[Rounded, Packed], torch.Tensor]:
        """The op for x [M, K] as `round_rows` makes it: [M, N]."""

    def build(self, instance: OpInstance) -> Kernel:
        """The op for an input that is not rounded yet. Only where nothing speaks against it."""
        product, rounding = self.of_rounded(instance), rounding_of(instance)
        assert rounding is not None

        def kernel(x: torch.Tensor, w: Packed) -> torch.Tensor:
            flat = x.reshape(-1, x.shape[-1]).contiguous()
            y = product(round_rows(flat, rounding), w)
            return y.view(*x.shape[:-1], y.shape[-1])

        return kernel


class NormBlock(OpProvider):
    """Claims a norm and what follows it, "norm_linear" or "norm_gated_mlp", where that takes 8-bit numbers.

    Packed is what follows, then the norm's weights.
    """

    version = Version(1, 0)

    def __init__(self, inner: TakesRounded) -> None:
        """`inner`: computes what follows."""
        self._inner = inner
        self.name, self.op = f"triton norm + {inner.name}", f"norm_{inner.op}"

    def supports(self, instance: OpInstance) -> Support:
        behind = self._behind(instance)
        if against := self._inner.against(behind):
            return Support(False, against)
        rounding = rounding_of(behind)
        assert rounding is not None
        if against := refusal(behind.weights[_FIRST[behind.op]].shape[-1], rounding):
            return Support(False, against)
        return Support(True, f"norm and rounding in one pass; {self._inner.supports(behind).reason}")

    def _behind(self, instance: OpInstance) -> OpInstance:
        """What follows the norm, as an instance of its own contract."""
        return replace(
            instance,
            op=self._inner.op,
            attrs={name: value for name, value in instance.attrs.items() if name not in _ATTRS},
            weights={name: spec for name, spec in instance.weights.items() if name not in _NORMS},
            wide_weights=(),
        )

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        norms = {name: weights[name] for name in _NORMS if name in weights}
        others = {name: weight for name, weight in weights.items() if name not in norms}
        return (*self._inner.pack(self._behind(instance), others), *super().pack(instance, norms))

    def packed_bytes(self, packed: Packed) -> Mapping[Hashable, int]:
        return self._inner.packed_bytes(packed)

    def build(self, instance: OpInstance) -> Kernel:
        behind = self._behind(instance)
        product, rounding = self._inner.of_rounded(behind), rounding_of(behind)
        kind, eps = (instance.attrs[name] for name in _ATTRS)
        names = [name for name in _NORMS if name in instance.weights]
        assert rounding is not None

        def block(x: torch.Tensor, residual: torch.Tensor, w: Packed) -> tuple[torch.Tensor, torch.Tensor]:
            held, norms = w[: len(w) - len(names)], dict(zip(names, w[len(w) - len(names) :], strict=True))
            weight, bias = (norms.get(name) for name in _NORMS)
            rounded, total = norm_round(x, residual, kind, eps, weight, bias, rounding)
            y = product(rounded, held)
            return y.view(*x.shape[:-1], y.shape[-1]), total

        return block
