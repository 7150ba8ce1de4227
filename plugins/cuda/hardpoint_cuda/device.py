"""An NVIDIA GPU: what every torch GPU has, and attention of prompts by FlashInfer where it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hardpoint_torch_gpu.device import TorchGpuDevice
from hardpoint_torch_gpu.rotary_attention import RotaryAttention

from hardpoint_cuda.flash_infer import FlashInferAttention, FlashPlanner, backend_for, missing
from hardpoint_cuda.flash_mla import LatentCache, has_flash_mla, mla_providers
from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import DeviceInfo
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.state_cache import StateCache

#: Lowest compute capability whose tensor cores multiply float8_e4m3fn.
_FLOAT8 = (8, 9)


class CudaDevice(TorchGpuDevice):
    """One GPU, with the platform's options."""

    def __init__(self, info: DeviceInfo, capabilities: Capabilities, options: Mapping[str, Any]) -> None:
        capability = torch.cuda.get_device_capability(info.index)
        super().__init__(
            info,
            capabilities,
            graphs=options.get("graphs", True),
            largest_graph=options.get("largest_graph", 512),
            float8=capability >= _FLOAT8,
            measure=options.get("measure", False),
            record=options.get("record", "first"),
            fuse=options.get("fuse", False),
        )
        self._before: tuple[OpProvider, ...] = ()
        wanted = options.get("flashinfer", "auto")
        if wanted != "off" and not missing():
            backend = backend_for(capability)
            planner = FlashPlanner(self.upload, self.torch_device, backend)
            flash = FlashInferAttention(planner, backend, self.measurements, compile=wanted == "compile")
            self._before = (flash, RotaryAttention(flash))
        self._before += mla_providers(self.upload, self.torch_device, capability, wanted)
        self._latents_together = has_flash_mla(capability)

    def providers(self) -> Sequence[OpProvider]:
        return (*self._before, *super().providers())

    def state_cache(self) -> StateCache:
        return LatentCache(self) if self._latents_together else super().state_cache()
