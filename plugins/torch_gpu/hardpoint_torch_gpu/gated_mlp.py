"""The gated MLP as a block, where its products are of 8-bit numbers: the activation rounds what it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hardpoint_platforms.ops.contract import OpInstance, Packed, Weight, WeightSpec
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.quant import QuantTensor
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu import eight_bits
from hardpoint_torch_gpu.kernels.activate_round import MOST, activate_round
from hardpoint_torch_gpu.kernels.activation import KINDS
from hardpoint_torch_gpu.kernels.round_input import Rounded
from hardpoint_torch_gpu.rounded_input import TakesRounded

_PRODUCTS = ("gate_up", "down")
_BIASES = ("gate_up_bias", "down_bias")


class EightBitMlp(TakesRounded):
    """Claims the block for 8-bit weights; all others are decomposed."""

    name, op, version = "triton gated mlp", "gated_mlp", Version(1, 0)

    def __init__(self, float8: bool = True) -> None:
        """`float8`: whether the device multiplies float8_e4m3fn."""
        self._float8 = float8

    def supports(self, instance: OpInstance) -> Support:
        against = self.against(instance)
        return Support(not against, against or "activation and rounding in one pass")

    def against(self, instance: OpInstance) -> str:
        for name in _PRODUCTS:
            scheme = instance.weights[name].scheme
            if scheme is None or scheme.rounding is None:
                return f"{name} is no product of 8-bit numbers"
            if against := eight_bits.refusal(instance, self._float8, name):
                return f"{name}: {against}"
        if self._width(instance) > MOST:
            return f"a scale for more than {MOST} columns"
        if instance.attrs["kind"] not in KINDS:
            return f"activation {instance.attrs['kind']}"
        return ""

    def _width(self, instance: OpInstance) -> int:
        """Columns of the activation per scale."""
        scheme = instance.weights["down"].scheme
        assert scheme is not None
        assert scheme.rounding is not None
        return int(scheme.rounding.group or instance.attrs["intermediate"])

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        packed: list[torch.Tensor] = []
        for name in _PRODUCTS:
            weight = weights[name]
            assert isinstance(weight, QuantTensor)
            packed += eight_bits.pack(weight)
        biases = {name: weights[name] for name in _BIASES if name in weights}
        return (*packed, *super().pack(instance, biases))

    def of_rounded(self, instance: OpInstance) -> Callable[[Rounded, Packed], torch.Tensor]:
        kind, limit, offset = (instance.attrs[name] for name in ("kind", "limit", "up_offset"))
        biases = [name for name in _BIASES if name in instance.weights]
        up_step, down_step = (_step(instance.weights[name]) for name in _PRODUCTS)

        def gated_mlp(x: Rounded, w: Packed) -> torch.Tensor:
            gate_up = eight_bits.unpacked(instance, w, "gate_up")
            down = eight_bits.unpacked(instance, w[eight_bits.PARTS :], "down")
            added = dict(zip(biases, w[2 * eight_bits.PARTS :], strict=True))
            both = eight_bits.rounded_product(x, gate_up, added.get("gate_up_bias"), up_step)
            inner = activate_round(both, kind, limit, offset, down.rounding)
            return eight_bits.rounded_product(inner, down, added.get("down_bias"), down_step)

        return gated_mlp


def _step(spec: WeightSpec) -> int:
    assert spec.scheme is not None
    return eight_bits.step_of(spec.scheme, spec.shape[-1])
