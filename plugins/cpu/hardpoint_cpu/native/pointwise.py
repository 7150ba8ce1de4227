"""Native norms, rotary embedding and activations."""

from __future__ import annotations

import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.provider import NativeProvider, heads_together, rows_of_last
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.ops.activation import KINDS
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.norm import KINDS as NORMS
from hardpoint_platforms.ops.provider import Support


class NativeNorm(NativeProvider):
    """All four kinds, over rows or over the heads of rows."""

    name = "native norm"
    op = "norm"
    code = Code.NORM

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, instance.attrs["kind"])

    def build(self, instance: OpInstance) -> Kernel:
        stage, kind, eps = self.stage, NORMS.index(instance.attrs["kind"]), instance.attrs["eps"]
        spec = instance.weights.get("weight")
        # A weight [h, H] has a row for each head; a bias then too, which the kernel does not know.
        by_head = spec.shape[-1] if spec is not None and len(spec.shape) == 2 else 0
        place = {name: index for index, name in enumerate(instance.weights)}

        def kernel(x: torch.Tensor, w: Packed = ()) -> torch.Tensor:
            width = x.shape[-1]
            rows = x if x.dim() == 3 and x.stride(2) == 1 else rows_of_last(x)
            out = torch.empty(rows.shape, device=x.device)
            inner = rows.shape[1] if rows.dim() == 3 else 1
            strides = (rows.stride(0), rows.stride(1) if inner > 1 else width, out.stride(0), width)
            weight, bias = (w[place[name]] if name in place else None for name in ("weight", "bias"))
            stage.call(
                Code.NORM, rows.shape[0], (rows, weight, bias, out), (width, kind, inner, *strides, by_head), (eps,)
            )
            return out if out.shape == x.shape else out.view(x.shape)

        return kernel


class NativeAddNorm(NativeProvider):
    """The residual sum, written over the old residual, and its norm."""

    name = "native add_norm"
    op = "add_norm"
    code = Code.ADD_NORM

    def takes(self, instance: OpInstance) -> Support:
        spec = instance.weights.get("weight")
        if spec is not None and len(spec.shape) == 2:
            return Support(False, "one weight for all heads only")
        return Support(True, instance.attrs["kind"])

    def build(self, instance: OpInstance) -> Kernel:
        stage, kind, eps = self.stage, NORMS.index(instance.attrs["kind"]), instance.attrs["eps"]
        place = {name: index for index, name in enumerate(instance.weights)}

        def kernel(x: torch.Tensor, residual: torch.Tensor, w: Packed = ()) -> tuple[torch.Tensor, torch.Tensor]:
            x, residual = x.contiguous(), residual.contiguous()
            width = x.shape[-1]
            rows = x.numel() // width
            out = torch.empty(x.shape, device=x.device)
            weight, bias = (w[place[name]] if name in place else None for name in ("weight", "bias"))
            stage.call(Code.ADD_NORM, rows, (x, residual, weight, bias, out, residual), (width, kind), (eps,))
            return out, residual

        return kernel


class NativeRope(NativeProvider):
    """Rotates in place, q and k in one call where their heads lie alike."""

    name = "native rope"
    op = "rope"
    code = Code.ROPE

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, "in place")

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs = self.stage, instance.attrs
        size, interleaved, tail = attrs["rotary_dim"], int(attrs["interleaved"]), int(attrs["tail"])

        def turn(x: torch.Tensor, other: torch.Tensor | None, positions: torch.Tensor, table: torch.Tensor) -> None:
            heads, others, stride = x.shape[1], 0, 0
            if other is not None:
                others, stride = other.shape[1], other.stride(0)
            shape = (heads, others, size, x.shape[2], interleaved, tail)
            strides = (x.stride(0), stride, x.stride(0), stride)
            stage.call(Code.ROPE, x.shape[0], (x, other, positions, table, x, other), (*shape, *strides))

        def kernel(
            q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, w: Packed
        ) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, positions = heads_together(q), heads_together(k), positions.contiguous()
            if q.shape[2] == k.shape[2]:
                turn(q, k, positions, w[0])
            else:
                turn(q, None, positions, w[0])
                turn(k, None, positions, w[0])
            return q, k

        return kernel


class NativeActivation(NativeProvider):
    """One activation function."""

    name = "native activation"
    op = "activation"
    code = Code.ACTIVATE

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, instance.attrs["kind"])

    def build(self, instance: OpInstance) -> Kernel:
        stage, kind = self.stage, KINDS.index(instance.attrs["kind"])

        def kernel(x: torch.Tensor) -> torch.Tensor:
            rows = rows_of_last(x)
            out = torch.empty(rows.shape, device=x.device)
            width = rows.shape[1]
            stage.call(Code.ACTIVATE, rows.shape[0], (rows, out), (width, kind, rows.stride(0), width))
            return out if x.dim() == 2 else out.view(x.shape)

        return kernel


class NativeGatedActivation(NativeProvider):
    """activation(first half) * second half."""

    name = "native gated activation"
    op = "gated_activation"
    code = Code.GATED

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, instance.attrs["kind"])

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs = self.stage, instance.attrs
        kind, limits = KINDS.index(attrs["kind"]), (attrs["limit"] or 0.0, attrs["up_offset"])

        def kernel(x: torch.Tensor) -> torch.Tensor:
            rows = rows_of_last(x)
            width = rows.shape[1] // 2
            out = torch.empty((rows.shape[0], width), device=x.device)
            stage.call(Code.GATED, rows.shape[0], (rows, out), (width, kind, rows.stride(0), width), limits)
            return out if x.dim() == 2 else out.view(*x.shape[:-1], width)

        return kernel


def gather_rows(stage: Stage, source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = source[index[r]] over float32 rows."""
    shape = (source.shape[1], source.stride(0), out.stride(0))
    stage.call(Code.GATHER, index.shape[0], (index, source, out), shape)


def copy_rows(stage: Stage, source: torch.Tensor, out: torch.Tensor) -> None:
    """out = source, float32 [rows, width] each."""
    stage.call(Code.COPY, source.shape[0], (source, out), (source.shape[1], source.stride(0), out.stride(0)))


def add_rows(stage: Stage, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a + b, contiguous float32 of one shape."""
    rows = a.shape[0]
    stage.call(Code.ADD, rows, (a, b, out), (a.numel() // max(1, rows),))
