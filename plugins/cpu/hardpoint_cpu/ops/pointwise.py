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
    """Rotary embedding over the heads of q and k together; cos and sin are looked up once per step."""

    name = "cpu rope"
    op = "rope"
    version = Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "q and k in one; cos and sin looked up once per step")

    def build(self, instance: OpInstance) -> Kernel:
        size: int = instance.attrs["rotary_dim"]
        tail: bool = instance.attrs["tail"]
        turn = _TurnPairs() if instance.attrs["interleaved"] else _TurnHalves()

        def kernel(
            q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, w: Packed
        ) -> tuple[torch.Tensor, torch.Tensor]:
            both = _side_by_side(q, k)
            width, dtype = both.shape[-1], both.dtype
            if size == width:
                turned = turn(both.float(), positions, w[0]).to(dtype)
            else:
                start = width - size if tail else 0
                turned = turn(both[..., start : start + size].float(), positions, w[0]).to(dtype)
                turned = torch.cat((both[..., :start], turned, both[..., start + size :]), -1)
            return turned.split_with_sizes((q.shape[1], k.shape[1]), 1)  # type: ignore[return-value]

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
    floor = torch.tensor(eps, dtype=torch.float32)

    def normalize(x: torch.Tensor, w: Packed) -> torch.Tensor:
        y = x.float() if wide else x
        if kind == "ln":
            y = F.layer_norm(y, y.shape[-1:], w[0] if fused else None, w[1] if fused and len(w) > 1 else None, eps)
            if fused:
                return y.to(x.dtype) if wide else y
        else:
            # Fewer passes than torch's rms_norm makes on the host.
            length = torch.linalg.vector_norm(y, 2, -1, True)
            y = y * torch.addcmul(floor, length, length, value=1 / y.shape[-1]).rsqrt_()
        if w:
            y.mul_(w[0])
            if len(w) > 1:
                y.add_(w[1])
        return y.to(x.dtype) if wide else y

    return normalize


class _TurnHalves:
    """Pairs (i, i + half) of x [T, heads, size] turned by the step's angles.

    Every layer of a step passes the same positions tensor, which nobody changes in place: cos and sin are kept with it.
    """

    def __init__(self) -> None:
        self._of: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        if self._of[0] is not positions or self._of[1] is not table:
            cos, self._sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)
            self._cos = torch.cat((cos, cos), -1)
            self._of = positions, table
        low, high = x.chunk(2, -1)
        turned = x * self._cos
        new_low, new_high = turned.chunk(2, -1)
        new_low.addcmul_(high, self._sin, value=-1)
        new_high.addcmul_(low, self._sin)
        return turned


class _TurnPairs:
    """Pairs (2 i, 2 i + 1) likewise, as one complex product."""

    def __init__(self) -> None:
        self._of: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        if self._of[0] is not positions or self._of[1] is not table:
            cos, sin = table.index_select(0, positions).chunk(2, -1)
            self._factors = torch.complex(cos, sin).unsqueeze(1)
            self._of = positions, table
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self._factors).flatten(-2)


def _side_by_side(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[T, heads of q and k, width]; without a copy where they are neighbours in one projection's output."""
    tokens, heads, width = q.shape
    neighbours = (
        q.stride() == k.stride()
        and k.storage_offset() == q.storage_offset() + heads * q.stride(1)
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    )
    if neighbours:
        return q.as_strided((tokens, heads + k.shape[1], width), q.stride())
    return torch.cat((q, k), 1)
