"""What a plugin writes per op: a provider that says yes or no with a reason, repacks weights, and builds a kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.quant import QuantTensor
from hardpoint_platforms.versioning import Version


@dataclass(frozen=True)
class Support:
    """A provider's answer. `reason` says why not, or what is special about the yes ("dequantized at load")."""

    yes: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.yes


class AttentionPlanner(ABC):
    """Turns a host batch into what a family of attention kernels reads. One call per step, outside the program."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Device tensors of bucket-static shape, handed to each attention kernel as `plan`."""


class OpProvider(ABC):
    """One implementation of one op contract.

    Class attributes:
        name: shown by `explain` ("torch sdpa", "reference").
        op: the contract's name.
        version: the contract version it was written against.
    """

    name: str
    op: str
    version: Version

    @abstractmethod
    def supports(self, instance: OpInstance) -> Support:
        """Whether it takes this instance. Asked once, at build time; must not allocate."""

    @abstractmethod
    def build(self, instance: OpInstance) -> Kernel:
        """A callable with the contract's signature. Called only after `supports` said yes."""

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        """Weights in the kernel's own layout, in the contract's order, on the weights' device.

        The default dequantizes to the activations' dtype and passes plain weights through, cast; those that the
        contract wants wide become float32.
        """
        packed = []
        for name, weight in weights.items():
            dtype = torch.float32 if name in instance.wide_weights else instance.dtype
            packed.append(weight.dequantize(dtype) if isinstance(weight, QuantTensor) else weight.to(dtype))
        return tuple(packed)

    def packed_bytes(self, packed: Packed) -> Mapping[Hashable, int]:
        """Bytes that packed weights hold, by what tells their memory apart: what several ops share counts once.

        The default counts the tensors; override it where a tensor stands for memory of the plugin's own.
        """
        return {_memory(tensor): tensor.numel() * tensor.element_size() for tensor in packed}

    def planner(self) -> AttentionPlanner | None:
        """For attention providers: the planner of its kernels, one object for all of them."""
        return None


def _memory(tensor: torch.Tensor) -> tuple[bool, int]:
    """A device's opaque layout has no address to show, and a handle of memory elsewhere shows 0."""
    address = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return bool(address), address or id(tensor)
