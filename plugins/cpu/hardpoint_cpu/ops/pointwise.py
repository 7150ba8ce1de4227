"""Norms, rotary embedding and activations on torch's kernels, with as few calls per token as torch allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.versioning import Version

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
}


class CpuNorm(OpProvider):
    """RMS and layer norm, in fp32; `rms1p` weights get their one at load."""

    name = "cpu norm"
    op = "norm"
    version = Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        kind = instance.attrs["kind"]
        if kind not in ("rms", "rms1p", "ln"):
            return Support(False, f"no {kind} norm")
        return Support(True, "torch layer_norm" if kind == "ln" else "torch rms_norm")

    def build(self, instance: OpInstance) -> Kernel:
        normalize = _normalizer(instance)
        return lambda x, w=(): normalize(x, w)

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        packed = super().pack(instance, weights)
        return (packed[0] + 1.0, *packed[1:]) if instance.attrs["kind"] == "rms1p" and packed else packed


class CpuAddNorm(CpuNorm):
    """The residual sum and its norm."""

    name = "cpu add_norm"
    op = "add_norm"

    def build(self, instance: OpInstance) -> Kernel:
        normalize = _normalizer(instance)

        def kernel(x: torch.Tensor, residual: torch.Tensor, w: Packed = ()) -> tuple[torch.Tensor, torch.Tensor]:
            total = x + residual
            return normalize(total, w), total

        return kernel


class CpuRope(OpProvider):
    """Rotary embedding as one complex product over the heads of q and k together."""

    name = "cpu rope"
    op = "rope"
    version = Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "complex product")

    def build(self, instance: OpInstance) -> Kernel:
        size: int = instance.attrs["rotary_dim"]
        tail: bool = instance.attrs["tail"]
        turn = _turn_interleaved if instance.attrs["interleaved"] else _turn_halves

        def kernel(
            q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, w: Packed
        ) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = w[0].index_select(0, positions).chunk(2, -1)
            factors = torch.complex(cos, sin).unsqueeze(1)
            both = torch.cat((q, k), 1)
            width, dtype = both.shape[-1], both.dtype
            start = width - size if tail else 0
            turned = turn(both[..., start : start + size].float(), factors).to(dtype)
            if size != width:
                turned = torch.cat((both[..., :start], turned, both[..., start + size :]), -1)
            return turned[:, : q.shape[1]], turned[:, q.shape[1] :]

        return kernel


class CpuActivation(OpProvider):
    """One activation function."""

    name = "cpu activation"
    op = "activation"
    version = Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        kind = instance.attrs["kind"]
        return Support(kind in _ACTIVATIONS, f"torch {kind}" if kind in _ACTIVATIONS else f"no {kind}")

    def build(self, instance: OpInstance) -> Kernel:
        return _ACTIVATIONS[instance.attrs["kind"]]


class CpuGatedActivation(CpuActivation):
    """activation(first half) * second half."""

    name = "cpu gated activation"
    op = "gated_activation"

    def supports(self, instance: OpInstance) -> Support:
        if instance.attrs["limit"] is not None or instance.attrs["up_offset"]:
            return Support(False, "no limit or up_offset")
        return super().supports(instance)

    def build(self, instance: OpInstance) -> Kernel:
        activate = _ACTIVATIONS[instance.attrs["kind"]]

        def kernel(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, -1)
            # activate() returned fresh memory, which may be written.
            return activate(gate).mul_(up)

        return kernel


def _normalizer(instance: OpInstance) -> Callable[[torch.Tensor, Packed], torch.Tensor]:
    kind, eps, wide = instance.attrs["kind"], instance.attrs["eps"], instance.dtype is not torch.float32
    spec = instance.weights.get("weight")
    # A weight of its own per head [h, d] is applied after the norm.
    fused = spec is not None and len(spec.shape) == 1

    def normalize(x: torch.Tensor, w: Packed) -> torch.Tensor:
        y = x.float() if wide else x
        shape = y.shape[-1:]
        if kind == "ln":
            y = F.layer_norm(y, shape, w[0] if fused else None, w[1] if fused and len(w) > 1 else None, eps)
        else:
            y = F.rms_norm(y, shape, w[0] if fused else None, eps)
            if fused and len(w) > 1:
                y = y + w[1]
        if w and not fused:
            y = y * w[0] if len(w) == 1 else y * w[0] + w[1]
        return y.to(x.dtype)

    return normalize


def _turn_interleaved(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2)


def _turn_halves(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    turned = torch.complex(low, high) * factors
    return torch.cat((turned.real, turned.imag), -1)
