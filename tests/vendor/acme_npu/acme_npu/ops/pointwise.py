"""What is done number by number or row by row: norms, rotary embedding, activations. All in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from acme_npu.ops.provider import AcmeProvider
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed

#: What the vector unit has; the others are left to the reference.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def normalized(x: torch.Tensor, w: Packed, kind: str, eps: float) -> torch.Tensor:
    """rms, rms1p, ln or l2 over the last dimension, times the weight, plus the bias."""
    wide = x.float()
    if kind == "ln":
        wide = wide - wide.mean(-1, keepdim=True)
    energy = wide.square()
    energy = energy.sum(-1, keepdim=True) if kind == "l2" else energy.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(energy + eps)
    if w:
        wide = wide * (w[0] + 1 if kind == "rms1p" else w[0])
    return (wide + w[1] if len(w) > 1 else wide).to(x.dtype)


class Norm(AcmeProvider):
    """Every kind."""

    op = "norm"

    def build(self, instance: OpInstance) -> Kernel:
        kind, eps, fault = instance.attrs["kind"], instance.attrs["eps"], self.fault

        def norm(x: torch.Tensor, w: Packed = ()) -> torch.Tensor:
            out = normalized(x, w, kind, eps)
            return out.double() if fault == "wrong_dtype" else out

        return self.launched(norm)


class AddNorm(AcmeProvider):
    """Every kind."""

    op = "add_norm"

    def build(self, instance: OpInstance) -> Kernel:
        kind, eps = instance.attrs["kind"], instance.attrs["eps"]

        def add_norm(x: torch.Tensor, residual: torch.Tensor, w: Packed = ()) -> tuple[torch.Tensor, torch.Tensor]:
            total = x + residual
            return normalized(total, w, kind, eps), total

        return self.launched(add_norm)


class Rope(AcmeProvider):
    """Rotates the first numbers of a head, by halves or by pairs."""

    op = "rope"

    def refuses(self, instance: OpInstance) -> str:
        return "rotates the beginning of a head, not its end" if instance.attrs["tail"] else super().refuses(instance)

    def build(self, instance: OpInstance) -> Kernel:
        size, pairs, fault = instance.attrs["rotary_dim"], instance.attrs["interleaved"], self.fault

        def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            part = x[..., :size].float().unflatten(-1, (-1, 2) if pairs else (2, -1))
            low, high = part.unbind(-1 if pairs else -2)
            both = torch.stack((low * cos - high * sin, high * cos + low * sin), dim=-1 if pairs else -2)
            return torch.cat((both.flatten(-2).to(x.dtype), x[..., size:]), dim=-1)

        def rope(
            q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, w: Packed
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if fault == "kernel_raises":
                raise RuntimeError("acme firmware: unit 3 reports 0xDEAD")
            cos, sin = w[0][positions][:, None].chunk(2, dim=-1)
            return turned(q, cos, sin), turned(k, cos, sin)

        return self.launched(rope)


class GatedActivation(AcmeProvider):
    """activation(gate) * up over halves of a row."""

    op = "gated_activation"

    def refuses(self, instance: OpInstance) -> str:
        kind = instance.attrs["kind"]
        return super().refuses(instance) if kind in ACTIVATIONS else f"the vector unit has no {kind}"

    def build(self, instance: OpInstance) -> Kernel:
        kind, limit, offset = (instance.attrs[name] for name in ("kind", "limit", "up_offset"))
        hangs = self.fault == "kernel_hangs"

        def gated_activation(x: torch.Tensor) -> torch.Tensor:
            if hangs:
                self.sleep()
            gate, up = x.float().chunk(2, dim=-1)
            return gated(gate, up, kind, limit, offset).to(x.dtype)

        return self.launched(gated_activation)


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str, limit: float | None, offset: float) -> torch.Tensor:
    """activation(min(gate, limit)) * (clamp(up, -limit, limit) + offset), float32."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ACTIVATIONS[kind](gate) * (up + offset)
