"""The gated MLP as a block, where its products are of 8-bit numbers: the activation rounds what it makes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight, WeightSpec
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.quant import QuantTensor
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu import eight_bits
from hardpoint_torch_gpu.kernels.activate_round import MOST, activate_round
from hardpoint_torch_gpu.kernels.activation import KINDS

_PRODUCTS = ("gate_up", "down")
_BIASES = ("gate_up_bias", "down_bias")


class EightBitMlp(OpProvider):
    """Claims the block for 8-bit weights; all others are decomposed."""

    name, op, version = "triton gated mlp", "gated_mlp", Version(1, 0)

    def __init__(self, float8: bool = True) -> None:
        """`float8`: whether the device multiplies float8_e4m3fn."""
        self._float8 = float8

    def supports(self, instance: OpInstance) -> Support:
        for name in _PRODUCTS:
            scheme = instance.weights[name].scheme
            if scheme is None or scheme.rounding is None:
                return Support(False, f"{name} is no product of 8-bit numbers")
            if against := eight_bits.refusal(instance, self._float8, name):
                return Support(False, f"{name}: {against}")
        if self._width(instance) > MOST:
            return Support(False, f"a scale for more than {MOST} columns")
        if instance.attrs["kind"] not in KINDS:
            return Support(False, f"activation {instance.attrs['kind']}")
        return Support(True, "activation and rounding in one pass")

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

    def build(self, instance: OpInstance) -> Kernel:
        kind, limit, offset = (instance.attrs[name] for name in ("kind", "limit", "up_offset"))
        biases = [name for name in _BIASES if name in instance.weights]
        up_step, down_step = (_step(instance.weights[name]) for name in _PRODUCTS)

        def gated_mlp(x: torch.Tensor, w: Packed) -> torch.Tensor:
            gate_up = eight_bits.unpacked(instance, w, "gate_up")
            down = eight_bits.unpacked(instance, w[eight_bits.PARTS :], "down")
            added = dict(zip(biases, w[2 * eight_bits.PARTS :], strict=True))
            both = eight_bits.eight_bit_product(x, gate_up, added.get("gate_up_bias"), up_step)
            inner = activate_round(both.view(-1, both.shape[-1]), kind, limit, offset, down.rounding)
            y = eight_bits.rounded_product(down.alike(inner), down, added.get("down_bias"), down_step)
            return y.view(*x.shape[:-1], y.shape[-1])

        return gated_mlp


def _step(spec: WeightSpec) -> int:
    assert spec.scheme is not None
    return eight_bits.step_of(spec.scheme, spec.shape[-1])
