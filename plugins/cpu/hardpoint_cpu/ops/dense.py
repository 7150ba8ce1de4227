"""Matrix products and look-ups on torch's kernels: linear, logits, embedding.

Quantized weights are dequantized at load, in the activations' dtype: torch's own quantized products round the
activations to bf16, and are no faster than fp32 ones without bf16 units. Where a scheme rounds its input, so does the
reference's way here. fp32 weights are laid out in blocks where the
device found that to pay (`blocked.py`). Embedding rows stay quantized and are dequantized as they are looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.nn.functional import embedding, linear

from hardpoint_cpu.ops.blocked import blocked_product, to_blocks
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.quant import QuantScheme, QuantTensor
from hardpoint_platforms.reference.linear import build_linear
from hardpoint_platforms.versioning import Version


def _dequantized(instance: OpInstance, kernel: str) -> Support:
    schemes = sorted({spec.scheme.name for spec in instance.weights.values() if spec.scheme is not None})
    if not schemes:
        return Support(True, kernel)
    dtype = str(instance.dtype).removeprefix("torch.")
    return Support(True, f"{kernel}; {', '.join(schemes)} dequantized at load to {dtype}")


class CpuLinear(OpProvider):
    """y = x W^T + b."""

    name = "cpu linear"
    op = "linear"
    version = Version(1, 0)

    def __init__(self, blocked: bool = False) -> None:
        """`blocked`: lay fp32 weights out in blocks."""
        self._blocked = blocked

    def supports(self, instance: OpInstance) -> Support:
        if _rounds(instance):
            return _dequantized(instance, "torch linear of inputs rounded to 8 bits")
        return _dequantized(instance, "blocked linear" if self._lays_out(instance) else "torch linear")

    def build(self, instance: OpInstance) -> Kernel:
        if _rounds(instance):
            return build_linear(instance)
        if self._lays_out(instance):
            product = blocked_product()
            if "bias" in instance.weights:
                return lambda x, w: product(x, w[0], w[1])
            return lambda x, w: product(x, w[0], None)
        if "bias" in instance.weights:
            return lambda x, w: linear(x, w[0], w[1])
        return lambda x, w: linear(x, w[0])

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        packed = super().pack(instance, weights)
        return (to_blocks(packed[0]), *packed[1:]) if self._lays_out(instance) else packed

    def _lays_out(self, instance: OpInstance) -> bool:
        return self._blocked and instance.dtype is torch.float32 and not _rounds(instance)


def _rounds(instance: OpInstance) -> bool:
    """Whether the op has to round its input; of those that are here `linear` alone has to."""
    scheme = instance.weights["weight"].scheme
    return instance.op == "linear" and scheme is not None and scheme.rounding is not None


class CpuLogits(CpuLinear):
    """The output projection, in fp32 from there on."""

    name = "cpu logits"
    op = "logits"

    def build(self, instance: OpInstance) -> Kernel:
        project = super().build(instance)
        scale, softcap = instance.attrs["scale"], instance.attrs["softcap"]

        def kernel(hidden: torch.Tensor, w: Packed) -> torch.Tensor:
            logits: torch.Tensor = project(hidden, w).float()
            if scale != 1.0:
                logits = logits * scale
            return softcap * torch.tanh(logits / softcap) if softcap else logits

        return kernel

    def _lays_out(self, instance: OpInstance) -> bool:
        # A plain weight may be the embedding's as well: blocks would be a second copy of the largest one.
        return super()._lays_out(instance) and instance.weights["weight"].scheme is not None


class CpuEmbedding(OpProvider):
    """Rows of a table, plain or quantized."""

    name = "cpu embedding"
    op = "embedding"
    version = Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        scheme = instance.weights["weight"].scheme
        return Support(True, "torch embedding" if scheme is None else f"{scheme.name} rows dequantized on look-up")

    def build(self, instance: OpInstance) -> Kernel:
        scale, spec = instance.attrs["scale"], instance.weights["weight"]
        look_up = embedding_of(spec.scheme, spec.shape[-1], instance.dtype) if spec.scheme else _plain
        if scale == 1.0:
            return look_up
        return lambda ids, w: look_up(ids, w) * scale

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        table = weights["weight"]
        if not isinstance(table, QuantTensor):
            return super().pack(instance, weights)
        return tuple(part for part in _parts(table) if part is not None)


def _plain(ids: torch.Tensor, w: Packed) -> torch.Tensor:
    return embedding(ids, w[0])


def embedding_of(scheme: QuantScheme, columns: int, dtype: torch.dtype) -> Kernel:
    """A look-up in a quantized table whose parts are packed one after another, absent ones left out."""

    own = replace(scheme, group_rows=1)  # of rows that were looked up

    def look_up(ids: torch.Tensor, w: Packed) -> torch.Tensor:
        by_row, codebook = (w[:-1], w[-1]) if scheme.codebook else (w, None)
        values, *rest = (part.index_select(0, ids) for part in (by_row[0], *by_row[2:]))
        scales = by_row[1].index_select(0, ids if own.group_rows == scheme.group_rows else ids // scheme.group_rows)
        offsets = rest.pop(0) if scheme.offset else None
        super_scales, super_offsets = [*rest, None, None][:2]
        shape = (ids.shape[0], columns)
        return QuantTensor(own, shape, values, scales, offsets, super_scales, super_offsets, codebook).dequantize(dtype)

    return look_up


def _parts(table: QuantTensor) -> tuple[torch.Tensor | None, ...]:
    return (
        table.values,
        table.scales,
        table.offsets,
        table.super_scales,
        table.super_offsets,
        table.codebook,
    )
