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


def triton_providers(device: Device) -> tuple[OpProvider, ...]:
    """One planner for all attention ops of the device."""
    return (
        TritonAttention(GpuPlanner(device.upload)),
        TorchLinear(),
        TorchLogits(),
        TableEmbedding(),
        TritonNorm(),
        TritonAddNorm(),
        TritonRope(),
        TritonActivation(),
        TritonGatedActivation(),
        TritonExperts(),
        TritonSample(),
        TritonLogprobs(),
        TritonVerify(),
    )
