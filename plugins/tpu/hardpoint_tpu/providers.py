"""Every contract's kernel as PyTorch of static shape that XLA compiles, and this plugin's own ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Altitude, Kernel, OpContract, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.quant import QuantTensor
from hardpoint_platforms.reference.providers import ReferenceProvider
from hardpoint_platforms.strict.providers import STATE_AT, STATIC
from hardpoint_tpu.kernels_table import Kernels
from hardpoint_tpu.ops.attention import PallasAttention
from hardpoint_tpu.ops.experts import RaggedExperts
from hardpoint_tpu.ops.paged import GatheredAttention
from hardpoint_tpu.ops.quantized import OPS as QUANTIZED
from hardpoint_tpu.ops.quantized import QuantizedProvider
from hardpoint_tpu.ops.sampling import OPS as SAMPLING
from hardpoint_tpu.ops.sampling import SortedSampling
from hardpoint_tpu.plan import RaggedPlanner
from hardpoint_tpu.runtime import Runtime


class XlaProvider(ReferenceProvider):
    """One op: the contract's reference where that is static, else the static form of it, compiled by XLA."""

    name = "xla"

    def __init__(
        self, contract: OpContract, planner: AttentionPlanner | None, runtime: Runtime, kernels: Kernels
    ) -> None:
        super().__init__(contract, planner)
        self._kernels = kernels
        self._dequantize = runtime.routine(QuantTensor.dequantize)

    def supports(self, instance: OpInstance) -> Support:
        answer = super().supports(instance)
        return Support(True, f"{answer.reason}, compiled by XLA") if answer else answer

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        """In the contract's order; quantized ones are dequantized in one program, the others stay the same memory."""
        names = (name.rstrip("?") for name in self._contract.weights)
        given = {name: weights[name] for name in names if name in weights}
        return tuple(
            self._plain(weight, torch.float32 if name in instance.wide_weights else instance.dtype)
            for name, weight in given.items()
        )

    def _plain(self, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return weight if weight.dtype is dtype else weight.to(dtype)
        parts = {field.name: getattr(weight, field.name) for field in fields(QuantTensor)}
        plain: torch.Tensor = self._dequantize(QuantTensor(**parts), dtype)
        return plain

    def build(self, instance: OpInstance) -> Kernel:
        if self.op in STATIC:
            return self._kernels.bind(self, instance, STATIC[self.op])
        return self._kernels.bind(self, instance, super().build)


def tpu_providers(runtime: Runtime) -> tuple[OpProvider, ...]:
    """Best first. Those that keep state share a planner.

    On the processor the plain forms come first: there Pallas is interpreted, a ragged product multiplies all rows by
    all experts, and products of quantized weights make the numbers anew in each step.
    """
    planner, kernels = RaggedPlanner(runtime), Kernels(runtime)
    plain: tuple[OpProvider, ...] = tuple(
        XlaProvider(contract, planner if contract.name in STATE_AT else None, runtime, kernels)
        for contract in CONTRACTS.values()
        if contract.altitude is not Altitude.BLOCK and contract.name != "attention"
    )
    plain = (GatheredAttention("attention", runtime, kernels, planner), *plain)
    first = tuple(SortedSampling(op, runtime, kernels) for op in SAMPLING)
    chip: tuple[OpProvider, ...] = (
        PallasAttention("attention", runtime, kernels, planner),
        RaggedExperts("experts", runtime, kernels),
        *(QuantizedProvider(op, runtime, kernels) for op in QUANTIZED),
    )
    return (*first, *chip, *plain) if runtime.on_tpu else (*first, *plain, *chip)
