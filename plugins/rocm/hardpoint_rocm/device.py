"""An AMD GPU: what every torch GPU has, with 8-bit floats in the kind that the chip multiplies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hardpoint_torch_gpu.device import TorchGpuDevice

from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import DeviceInfo
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.streams import Readback
from hardpoint_rocm.architectures import Architecture, Float8
from hardpoint_rocm.fnuz import as_fnuz
from hardpoint_rocm.losses import TellingReadback, telling


class RocmDevice(TorchGpuDevice):
    """One GPU, with the platform's options."""

    def __init__(
        self, info: DeviceInfo, capabilities: Capabilities, options: Mapping[str, Any], architecture: Architecture
    ) -> None:
        super().__init__(
            info,
            capabilities,
            graphs=options.get("graphs", True),
            largest_graph=options.get("largest_graph", 512),
            float8=architecture.float8 is not Float8.NONE,
            measure=options.get("measure", False),
        )
        self._fnuz = as_fnuz(super().providers()) if architecture.float8 is Float8.FNUZ else None

    def providers(self) -> Sequence[OpProvider]:
        return super().providers() if self._fnuz is None else self._fnuz

    def synchronize(self) -> None:
        with telling(self.info):
            super().synchronize()

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        with telling(self.info):
            return TellingReadback(list(tensors), self.info)
