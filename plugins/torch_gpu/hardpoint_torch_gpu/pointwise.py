"""Norms, rope, activations and embedding through the Triton kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels import activation, rope
from hardpoint_torch_gpu.kernels import norm as norms

_ONE = Version(1, 0)


def _row_fits(instance: OpInstance) -> Support:
    sizes = [spec.shape[-1] for spec in instance.weights.values()]
    if sizes and max(sizes) > norms.LONGEST:
        return Support(False, f"rows of {max(sizes)}, the kernel holds up to {norms.LONGEST}")
    return Support(True, str(instance.attrs["kind"]))


def _named(instance: OpInstance, w: Packed) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weight and bias of a norm, each where it is there."""
    found = dict(zip(instance.weights, w, strict=True))
    return found.get("weight"), found.get("bias")


class TritonNorm(OpProvider):
    """A norm alone."""

    name, op, version = "triton norm", "norm", _ONE

    def supports(self, instance: OpInstance) -> Support:
        return _row_fits(instance)

    def build(self, instance: OpInstance) -> Kernel:
        kind, eps = instance.attrs["kind"], instance.attrs["eps"]

        def norm(x: torch.Tensor, w: Packed = ()) -> torch.Tensor:
            return norms.norm(x, kind, eps, *_named(instance, w))[0]

        return norm


class TritonAddNorm(OpProvider):
    """A residual addition and the norm of the sum."""

    name, op, version = "triton add_norm", "add_norm", _ONE

    def supports(self, instance: OpInstance) -> Support:
        return _row_fits(instance)

    def build(self, instance: OpInstance) -> Kernel:
        kind, eps = instance.attrs["kind"], instance.attrs["eps"]

        def add_norm(x: torch.Tensor, residual: torch.Tensor, w: Packed = ()) -> tuple[torch.Tensor, torch.Tensor]:
            return norms.norm(x, kind, eps, *_named(instance, w), residual)

        return add_norm


class TritonRope(OpProvider):
    """Rotary embedding, in place."""

    name, op, version = "triton rope", "rope", _ONE

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "in place")

    def build(self, instance: OpInstance) -> Kernel:
        interleaved, tail = instance.attrs["interleaved"], instance.attrs["tail"]

        def rotate(
            q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, w: Packed
        ) -> tuple[torch.Tensor, torch.Tensor]:
            q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
            rope.rope(q, k, positions, w[0], interleaved, tail)
            return q, k

        return rotate


class TritonActivation(OpProvider):
    """An activation."""

    name, op, version = "triton activation", "activation", _ONE

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, str(instance.attrs["kind"]))

    def build(self, instance: OpInstance) -> Kernel:
        kind = instance.attrs["kind"]
        return lambda x: activation.activate(x, kind, gated=False)


class TritonGatedActivation(OpProvider):
    """An activation of the gate, times what it gates."""

    name, op, version = "triton gated activation", "gated_activation", _ONE

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, str(instance.attrs["kind"]))

    def build(self, instance: OpInstance) -> Kernel:
        kind, limit, offset = (instance.attrs[name] for name in ("kind", "limit", "up_offset"))
        return lambda x: activation.activate(x, kind, True, limit, offset)


class TorchEmbedding(OpProvider):
    """Rows of a table."""

    name, op, version = "torch embedding", "embedding", _ONE

    def supports(self, instance: OpInstance) -> Support:
        scheme = instance.weights["weight"].scheme
        return Support(True, "" if scheme is None else f"{scheme.name} dequantized at load")

    def build(self, instance: OpInstance) -> Kernel:
        scale = instance.attrs["scale"]

        def embedding(token_ids: torch.Tensor, w: Packed) -> torch.Tensor:
            rows = F.embedding(token_ids, w[0])
            return rows if scale == 1.0 else rows * scale

        return embedding
