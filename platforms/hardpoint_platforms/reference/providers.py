"""The reference's providers: one per contract, all of them taken where a device has nothing better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Altitude, Kernel, OpContract, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.reference.plan import Put, ReferencePlanner

NAME = "reference"


class ReferenceProvider(OpProvider):
    """A contract's own reference as a provider. Quantized weights are dequantized when they are packed."""

    name = NAME

    def __init__(self, contract: OpContract, planner: AttentionPlanner | None = None) -> None:
        """`planner` only for contracts that take a plan."""
        self.op = contract.name
        self.version = contract.version
        self._contract = contract
        self._planner = planner

    def supports(self, instance: OpInstance) -> Support:
        if self._contract.reference is None:
            return Support(False, f"{self.op} has no reference")
        schemes = sorted({spec.scheme.name for spec in instance.weights.values() if spec.scheme is not None})
        if schemes:
            return Support(True, f"plain PyTorch, {', '.join(schemes)} dequantized at load")
        return Support(True, "plain PyTorch")

    def build(self, instance: OpInstance) -> Kernel:
        if self._contract.reference is None:
            raise UnsupportedOperation(f"{self.op} has no reference")
        return self._contract.reference(instance)

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        names = (name.rstrip("?") for name in self._contract.weights)
        return super().pack(instance, {name: weights[name] for name in names if name in weights})

    def planner(self) -> AttentionPlanner | None:
        return self._planner


def reference_providers(put: Put | torch.device | None = None) -> tuple[OpProvider, ...]:
    """One provider per composite and primitive, with one planner for all that take a plan.

    Blocks are left out: a device's own composites come before a reference block. `put` brings the
    arrays of plans to the device (`Device.to_device`, or a torch device); None leaves them on the host.
    """
    return _providers(put, [one for one in CONTRACTS.values() if one.altitude is not Altitude.BLOCK])


def reference_blocks(put: Put | torch.device | None = None) -> tuple[OpProvider, ...]:
    """One provider per block, for tests: to hold a device's own blocks against."""
    return _providers(put, [one for one in CONTRACTS.values() if one.altitude is Altitude.BLOCK])


def _providers(put: Put | torch.device | None, contracts: Sequence[OpContract]) -> tuple[OpProvider, ...]:
    planner = ReferencePlanner(put or torch.device("cpu"))
    return tuple(
        ReferenceProvider(contract, planner if "plan" in _arguments(contract) else None) for contract in contracts
    )


def _arguments(contract: OpContract) -> tuple[str, ...]:
    """Argument names out of the contract's signature."""
    inside = contract.signature.partition("(")[2].partition(") ->")[0]
    return tuple(word.partition(":")[0].strip() for word in inside.split(","))
