"""8-bit floats of checkpoints on chips that multiply the other kind (gfx942): weights are converted once, at load.

float8_e4m3fn and float8_e4m3fnuz read the same eight bits alike, but for a factor and for three codes:

    bits          e4m3fn         e4m3fnuz       here
    0x80          -0             NaN            becomes 0x00
    0x7F, 0xFF    NaN            240, -240      become 0x80
    all others    v              v / 2          stay; the scale doubles

An input is rounded as on any other chip, to numbers of e4m3fn, whose bits are then read as the other kind: no rounding
makes a negative zero, and a row with a NaN or an infinity has that in its scale. So the products are the same numbers,
a quarter as large: the weight's scale takes up both factors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from hardpoint_torch_gpu.kernels.round_input import Rounded
from hardpoint_torch_gpu.rounded_input import TakesRounded

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.quant import Packing

_NEGATIVE_ZERO, _NAN, _MAGNITUDE = 0x80, 0x7F, 0x7F
#: Of the weight's numbers and of the input's.
_FACTOR = 4.0
#: Ops whose providers keep such weights as they are and multiply them so.
_PRODUCTS = ("linear", "gated_mlp", "norm_linear", "norm_gated_mlp", "experts")


def to_fnuz(values: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn -> float8_e4m3fnuz of half of each number, exactly; NaN stays NaN, and -0 becomes 0."""
    bits = values.view(torch.uint8)
    nan = bits & _MAGNITUDE == _NAN
    other = bits.masked_fill(bits == _NEGATIVE_ZERO, 0).masked_fill_(nan, _NEGATIVE_ZERO)
    return other.view(torch.float8_e4m3fnuz)


def _converted(packed: Packed) -> Packed:
    """Packed weights, those of float8_e4m3fn converted: the tensor behind each has its scales."""
    found = list(packed)
    for place, part in enumerate(packed):
        if part.dtype is torch.float8_e4m3fn:
            found[place], found[place + 1] = to_fnuz(part), packed[place + 1] * _FACTOR
    return tuple(found)


class AsFnuz(TakesRounded):
    """Another provider of products of 8-bit numbers, whose floats are converted at load.

    It takes an input that is rounded before where the other one does.
    """

    def __init__(self, inner: OpProvider) -> None:
        self._inner = inner
        self.name, self.op, self.version = f"{inner.name}, fnuz", inner.op, inner.version

    def supports(self, instance: OpInstance) -> Support:
        answer = self._inner.supports(instance)
        floats = [
            spec.scheme is not None and spec.scheme.rounding is not None and spec.scheme.packing is Packing.FLOAT8
            for spec in instance.weights.values()
        ]
        return replace(answer, reason=f"{answer.reason}; as e4m3fnuz") if answer and any(floats) else answer

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        return _converted(self._inner.pack(instance, weights))

    def packed_bytes(self, packed: Packed) -> Mapping[Hashable, int]:
        return self._inner.packed_bytes(packed)

    def build(self, instance: OpInstance) -> Kernel:
        return self._inner.build(instance)

    def against(self, instance: OpInstance) -> str:
        if not isinstance(self._inner, TakesRounded):
            return f"{self._inner.name} rounds its input itself"
        return self._inner.against(instance)

    def of_rounded(self, instance: OpInstance) -> Callable[[Rounded, Packed], torch.Tensor]:
        assert isinstance(self._inner, TakesRounded)
        return self._inner.of_rounded(instance)


def as_fnuz(providers: Sequence[OpProvider]) -> tuple[OpProvider, ...]:
    """The same providers, those of products with float8_e4m3fn replaced."""
    return tuple(AsFnuz(one) if one.op in _PRODUCTS else one for one in providers)
