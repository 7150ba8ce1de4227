"""What every GPU with Triton offers, best first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_torch_gpu.attention import TritonAttention
from hardpoint_torch_gpu.dense import TableEmbedding, TorchLinear, TorchLogits
from hardpoint_torch_gpu.experts import TritonExperts
from hardpoint_torch_gpu.plan import GpuPlanner
from hardpoint_torch_gpu.pointwise import (
    TritonActivation,
    TritonAddNorm,
    TritonGatedActivation,
    TritonNorm,
    TritonRope,
)
from hardpoint_torch_gpu.sampling import TritonLogprobs, TritonSample, TritonVerify

if TYPE_CHECKING:
    from hardpoint_platforms.device import Device


def triton_providers(device: Device, float8: bool = True) -> tuple[OpProvider, ...]:
    """One planner for all attention ops of the device. `float8`: whether the device multiplies float8_e4m3fn."""
    return (
        TritonAttention(GpuPlanner(device.upload)),
        TorchLinear(float8),
        TorchLogits(),
        TableEmbedding(),
        TritonNorm(),
        TritonAddNorm(),
        TritonRope(),
        TritonActivation(),
        TritonGatedActivation(),
        TritonExperts(float8),
        TritonSample(),
        TritonLogprobs(),
        TritonVerify(),
    )
