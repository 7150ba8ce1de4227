"""An AMD GPU: what every torch GPU has, with 8-bit floats in the kind that the chip multiplies, and AITER if wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from hardpoint_torch_gpu.device import TorchGpuDevice
from hardpoint_torch_gpu.rotary_attention import RotaryAttention
from hardpoint_torch_gpu.rounded_input import NormBlock, TakesRounded

from hardpoint_platforms.capabilities import Capabilities, TuningChoice
from hardpoint_platforms.device import DeviceInfo
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.streams import Readback
from hardpoint_rocm.aiter_attention import AiterAttention, AiterPlanner
from hardpoint_rocm.aiter_library import ATTENTION, Aiter, look_up, unwanted
from hardpoint_rocm.aiter_products import AiterGatedMlp, AiterLinear
from hardpoint_rocm.aiter_trial import Trial
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
        fnuz = architecture.float8 is Float8.FNUZ
        plain = super().providers()
        base = as_fnuz(plain) if fnuz else tuple(plain)
        if options.get("aiter", "off") == "on":
            kind = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
            library = look_up(architecture, Trial(self.torch_device), kind)
            base = (*self._by_aiter(library, base), *base)
        else:
            library = unwanted()
        self._table = base
        told = TuningChoice("AITER", library.value, library.reason)
        self._told = replace(capabilities, tuning=(*capabilities.tuning, told))

    def _by_aiter(self, library: Aiter, base: Sequence[OpProvider]) -> tuple[OpProvider, ...]:
        """Asked before `base`; they say why not where AITER is not there or does not fit."""
        inner = {provider.op: provider for provider in reversed(base) if isinstance(provider, TakesRounded)}
        planner = AiterPlanner(self.upload, self.torch_device)
        linear, mlp = AiterLinear(inner["linear"], library), AiterGatedMlp(inner["gated_mlp"], library)
        attention = AiterAttention(planner, library.functions[ATTENTION])
        return (attention, RotaryAttention(attention), linear, mlp, NormBlock(linear), NormBlock(mlp))

    def capabilities(self) -> Capabilities:
        return self._told

    def providers(self) -> Sequence[OpProvider]:
        return self._table

    def synchronize(self) -> None:
        with telling(self.info):
            super().synchronize()

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        with telling(self.info):
            return TellingReadback(list(tensors), self.info)
