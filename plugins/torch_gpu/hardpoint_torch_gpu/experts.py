"""Mixture of experts on the device: routed tokens multiply only their experts, in kernels that a graph can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight, WeightSpec
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.quant import QuantScheme, QuantTensor, Rounding, round_input
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu import eight_bits
from hardpoint_torch_gpu.kernels.eight_bit_gemm import EightBitWeight
from hardpoint_torch_gpu.kernels.experts import Cut, Epilogue, Routing, combine, grouped, route
from hardpoint_torch_gpu.kernels.quant_gemm import QuantWeight
from hardpoint_torch_gpu.kernels.round_input import Rounded
from hardpoint_torch_gpu.quantized import PARTS, pack, refusal, unpacked

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PRODUCTS = ("gate_up", "down")
#: Numbers that a kernel may count in 32 bits.
_COUNTED = 1 << 31


@dataclass(frozen=True)
class _Place:
    """Where a weight begins among the packed ones, and how it is held.

    Attributes:
        index: of its first tensor.
        flat: as what instance it stays quantized; None for a plain one.
        step: columns per step where both operands are of 8 bits, else 0.
        apart: how x is rounded where they are not.
    """

    index: int
    flat: OpInstance | None = None
    step: int = 0
    apart: Rounding | None = None

    @property
    def parts(self) -> int:
        """Tensors that it takes."""
        return 1 if self.flat is None else eight_bits.PARTS if self.step else PARTS

    def find(self, w: Packed) -> torch.Tensor | QuantWeight | EightBitWeight:
        """The right operand of `grouped`."""
        here = w[self.index : self.index + self.parts]
        if self.flat is None:
            return here[0]
        return eight_bits.unpacked(self.flat, here) if self.step else unpacked(self.flat, here)

    def product(
        self,
        x: torch.Tensor,
        w: Packed,
        bias: torch.Tensor | None,
        routing: Routing,
        rows: int,
        gather: bool,
        epilogue: Epilogue,
    ) -> torch.Tensor:
        """`grouped` with this weight, x rounded as its scheme wants it."""
        weight = self.find(w)
        left: torch.Tensor | Rounded = x
        if isinstance(weight, EightBitWeight):
            left = weight.rounded(x)
        elif self.apart is not None:
            left = round_input(x, self.apart).to(x.dtype)
        cut = eight_bit_cutting(routing.tokens, self.step) if self.step else None
        cut = cut or cutting(routing.tokens, x.dtype, self.flat is not None)
        return grouped(left, weight, bias, routing, rows, gather, epilogue, cut)


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


def eight_bit_cutting(tokens: int, step: int) -> Cut:
    """The same where both operands are of 8 bits; `step` columns per step."""
    return Cut(128, 128, step, 8, 4) if tokens == 128 else Cut(64, tokens, step, 4, 4)


class TritonExperts(OpProvider):
    """A counting sort by expert, a grouped product per weight, and a sum over each token's experts.

    `float8`: whether the device multiplies float8_e4m3fn.
    """

    name, op, version = "triton experts", "experts", Version(1, 0)

    def __init__(self, float8: bool = True) -> None:
        self._float8 = float8

    def supports(self, instance: OpInstance) -> Support:
        if instance.dtype not in _DTYPES:
            return Support(False, f"activations are {str(instance.dtype).removeprefix('torch.')}")
        for name in _PRODUCTS:
            experts, rows, _ = instance.weights[name].shape
            if experts * rows >= _COUNTED:
                return Support(False, f"{name} has {experts * rows} rows, the kernel counts fewer than {_COUNTED}")
        return Support(True, "; ".join(("grouped products", *self._kept(instance))))

    def _kept(self, instance: OpInstance) -> list[str]:
        """How each quantized weight is held."""
        notes = []
        for name in _PRODUCTS:
            scheme = instance.weights[name].scheme
            if scheme is None:
                continue
            flat = _flat(instance, name)
            against = refusal(flat)
            how = f"{scheme.name} dequantized at load: {against}" if against else f"{scheme.name} stays packed"
            if scheme.rounding is not None:
                apart = eight_bits.refusal(flat, self._float8)
                eight = f"{scheme.name} stays packed, products of 8-bit numbers"
                how = f"{how}; x rounded apart: {apart}" if apart else eight
            notes.append(f"{name} {how}")
        return notes

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        packed: list[torch.Tensor] = []
        places = self._places(instance)
        for name, weight in weights.items():
            place = places[name]
            if place.flat is not None and isinstance(weight, QuantTensor):
                joined = _joined(weight)
                packed += eight_bits.pack(joined) if place.step else pack(joined, instance.dtype)
            else:
                packed += (part.contiguous() for part in super().pack(instance, {name: weight}))
        return tuple(packed)

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs
        experts, hidden, inner = (attrs[name] for name in ("experts", "hidden", "intermediate"))
        places = self._places(instance)
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
            h = up_at.product(x.contiguous(), w, up_bias, routing, inner, True, first)
            parts = down_at.product(h, w, down_bias, routing, hidden, False, second)
            return combine(parts, ids.shape[1])

        return kernel

    def _places(self, instance: OpInstance) -> dict[str, _Place]:
        """By name, in the order that `pack` keeps."""
        places: dict[str, _Place] = {}
        index = 0
        for name in instance.weights:
            places[name] = self._place(instance, name, index)
            index += places[name].parts
        return places

    def _place(self, instance: OpInstance, name: str, index: int) -> _Place:
        scheme = instance.weights[name].scheme
        if name not in _PRODUCTS or scheme is None:
            return _Place(index)
        flat = _flat(instance, name)
        if scheme.rounding is not None and not eight_bits.refusal(flat, self._float8):
            return _Place(index, flat, eight_bits.step_of(scheme, instance.weights[name].shape[-1]))
        return _Place(index, None if refusal(flat) else flat, apart=scheme.rounding)


def _flat(instance: OpInstance, name: str) -> OpInstance:
    """An instance whose one weight has the rows of all experts, one expert after the other."""
    spec = instance.weights[name]
    experts, rows, columns = spec.shape
    assert spec.scheme is not None
    scheme = replace(spec.scheme, group_rows=_group_rows(spec.scheme, rows))
    return replace(instance, weights={"weight": WeightSpec((experts * rows, columns), spec.dtype, scheme)})


def _group_rows(scheme: QuantScheme, rows: int) -> int:
    """Rows per scale where experts lie one after the other: none is shared by two."""
    return scheme.group_rows if rows % scheme.group_rows == 0 else 1


def _joined(weight: QuantTensor) -> QuantTensor:
    """[E, R, K] as [E R, K]: groups lie along columns, so that no part of a row's packing knows of experts."""
    experts, rows, columns = weight.shape
    group_rows, scales = _group_rows(weight.scheme, rows), weight.scales
    if group_rows != weight.scheme.group_rows:
        scales = scales.repeat_interleave(weight.scheme.group_rows, -2)[:, :rows]
    return replace(
        weight,
        scheme=replace(weight.scheme, group_rows=group_rows),
        shape=(experts * rows, columns),
        values=weight.values.flatten(0, 1),
        scales=scales.flatten(0, 1),
        offsets=_rows(weight.offsets),
        super_scales=_rows(weight.super_scales),
        super_offsets=_rows(weight.super_offsets),
    )


def _rows(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.flatten(0, 1)
