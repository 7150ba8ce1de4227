"""What all native providers share: float32 activations, a stage, a kernel that the library must have."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.attention_plan import NativePlanner
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.ops.contract import OpInstance, Packed
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.versioning import Version


@dataclass(frozen=True)
class Setting:
    """What the providers of one device have in common. exact: float32 products of dequantized weights."""

    stage: Stage
    exact: bool = False


class NativeProvider(OpProvider):
    """An op with a kernel in the library.

    Class attributes: `code`, without which the op is left to others.
    """

    version = Version(1, 0)
    code: Code

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.stage = setting.stage

    def supports(self, instance: OpInstance) -> Support:
        if instance.dtype is not torch.float32:
            return Support(False, f"activations are float32, not {str(instance.dtype).removeprefix('torch.')}")
        if not self.stage.library.has(self.code):
            return Support(False, f"the library has no {self.code.name} kernel")
        return self.takes(instance)

    @abstractmethod
    def takes(self, instance: OpInstance) -> Support:
        """`supports`, for float32 activations and a kernel that is there."""

    def packed_bytes(self, packed: Packed) -> Mapping[Hashable, int]:
        found: dict[Hashable, int] = {}
        for tensor in packed:
            found.update(self.held_bytes(tensor))
        return found

    def held_bytes(self, tensor: torch.Tensor) -> Mapping[Hashable, int]:
        """Bytes of what a packed tensor stands for: its own, unless it holds addresses."""
        return super().packed_bytes((tensor,))


class PlannedProvider(NativeProvider):
    """One whose kernels read the step's plan; all of a device share one planner."""

    def __init__(self, setting: Setting, planner: NativePlanner) -> None:
        super().__init__(setting)
        self._planner = planner

    def planner(self) -> AttentionPlanner:
        return self._planner


def rows_of_last(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, width] with neighbouring elements side by side; a view where it can be one."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def heads_together(x: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, width] with each row's heads side by side; a copy where they are not."""
    together = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if together else x.contiguous()


def row_stride(x: torch.Tensor) -> int:
    """Elements from row to row. For a single row any will do, and torch may say anything."""
    return x.stride(0)
