"""Mixture of experts on the device: routed tokens multiply only their experts, in kernels that a graph can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight, WeightSpec
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.quant import QuantTensor
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.experts import Cut, Epilogue, combine, grouped, route
from hardpoint_torch_gpu.kernels.quant_gemm import QuantWeight
from hardpoint_torch_gpu.quantized import PARTS, pack, refusal, unpacked

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PRODUCTS = ("gate_up", "down")
#: Numbers that a kernel may count in 32 bits.
_COUNTED = 1 << 31


@dataclass(frozen=True)
class _Place:
    """Where a weight begins among the packed ones, and as what instance it stays quantized; None for a plain one."""

    index: int
    flat: OpInstance | None

    def find(self, w: Packed) -> torch.Tensor | QuantWeight:
        """The operand of `grouped`."""
        if self.flat is None:
            return w[self.index]
        return unpacked(self.flat, w[self.index : self.index + PARTS])


def tokens_per_tile(slots: int, experts: int) -> int:
    """Slots of a tile: the smallest size that holds an expert's share with some room, as few experts have the mean."""
    return next((size for size in (16, 32, 64) if 4 * slots <= 3 * size * experts), 128)


def cutting(tokens: int, dtype: torch.dtype, packed: bool) -> Cut:
    """How a product is cut whose tiles have `tokens` slots. `packed`: a quantized weight."""
    if dtype is torch.float32:
        return Cut(32, tokens, 32, 4, 1)
    if tokens == 128:
        return Cut(128, 128, 64, 8, 3)
    if packed:
        return Cut(64, tokens, 128, 2 if tokens == 16 else 4, 4 if tokens == 16 else 3)
    if tokens == 64:
        return Cut(128, 64, 64, 4, 4)
    return Cut(64, tokens, 128, 4, 4 if tokens == 16 else 3)


class TritonExperts(OpProvider):
    """A counting sort by expert, a grouped product per weight, and a sum over each token's experts."""

    name, op, version = "triton experts", "experts", Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        if instance.dtype not in _DTYPES:
            return Support(False, f"activations are {str(instance.dtype).removeprefix('torch.')}")
        for name in _PRODUCTS:
            experts, rows, _ = instance.weights[name].shape
            if experts * rows >= _COUNTED:
                return Support(False, f"{name} has {experts * rows} rows, the kernel counts fewer than {_COUNTED}")
        return Support(True, "; ".join(("grouped products", *self._kept(instance))))

    @staticmethod
    def _kept(instance: OpInstance) -> list[str]:
        """How each quantized weight is held."""
        notes = []
        for name in _PRODUCTS:
            scheme = instance.weights[name].scheme
            if scheme is not None:
                against = refusal(_flat(instance, name))
                how = f"{scheme.name} dequantized at load: {against}" if against else f"{scheme.name} stays packed"
                notes.append(f"{name} {how}")
        return notes

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        packed: list[torch.Tensor] = []
        for name, weight in weights.items():
            if name in _PRODUCTS and isinstance(weight, QuantTensor) and not refusal(_flat(instance, name)):
                packed += pack(_joined(weight), instance.dtype)
            else:
                packed += (part.contiguous() for part in super().pack(instance, {name: weight}))
        return tuple(packed)

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs
        experts, hidden, inner = (attrs[name] for name in ("experts", "hidden", "intermediate"))
        places = _places(instance)
        first = Epilogue(
            attrs["gated"],
            attrs["interleaved"],
            attrs["activation"],
            attrs["limit"] if attrs["gated"] else None,
            attrs["up_offset"],
            early=attrs["weight_on_input"],
        )
        second = Epilogue(late=not attrs["weight_on_input"])
        up_at, down_at = (places[name] for name in _PRODUCTS)
        biases = tuple(places[name].index for name in ("gate_up_bias", "down_bias") if name in places)

        def kernel(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w: Packed) -> torch.Tensor:
            if not ids.numel():
                return torch.zeros_like(x)
            tokens = tokens_per_tile(ids.numel(), experts)
            up_bias, down_bias = (w[index] for index in biases) if biases else (None, None)
            routing = route(ids, weights, experts, tokens)
            up_cut, down_cut = (cutting(tokens, x.dtype, at.flat is not None) for at in (up_at, down_at))
            h = grouped(x.contiguous(), up_at.find(w), up_bias, routing, inner, True, first, up_cut)
            parts = grouped(h, down_at.find(w), down_bias, routing, hidden, False, second, down_cut)
            return combine(parts, ids.shape[1])

        return kernel


def _flat(instance: OpInstance, name: str) -> OpInstance:
    """An instance whose one weight has the rows of all experts, one expert after the other."""
    spec = instance.weights[name]
    experts, rows, columns = spec.shape
    return replace(instance, weights={"weight": WeightSpec((experts * rows, columns), spec.dtype, spec.scheme)})


def _joined(weight: QuantTensor) -> QuantTensor:
    """[E, R, K] as [E R, K]: groups lie along columns, so that no part of a row's packing knows of experts."""
    experts, rows, columns = weight.shape
    return replace(
        weight,
        shape=(experts * rows, columns),
        values=weight.values.flatten(0, 1),
        scales=weight.scales.flatten(0, 1),
        offsets=_rows(weight.offsets),
        super_scales=_rows(weight.super_scales),
        super_offsets=_rows(weight.super_offsets),
    )


def _rows(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.flatten(0, 1)


def _places(instance: OpInstance) -> dict[str, _Place]:
    """By name, in the order that `pack` keeps."""
    places, index = {}, 0
    for name, spec in instance.weights.items():
        flat = _flat(instance, name) if name in _PRODUCTS and spec.scheme is not None else None
        if flat is not None and refusal(flat):
            flat = None
        places[name] = _Place(index, flat)
        index += 1 if flat is None else PARTS
    return places
