"""What every GPU with Triton offers, best first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_torch_gpu.adapters import TritonLora
from hardpoint_torch_gpu.attention import TritonAttention
from hardpoint_torch_gpu.dense import TableEmbedding, TorchLinear, TorchLogits
from hardpoint_torch_gpu.experts import TritonExperts
from hardpoint_torch_gpu.few_rows import FewRows
from hardpoint_torch_gpu.gated_mlp import EightBitMlp
from hardpoint_torch_gpu.last_resort import GpuSdpa
from hardpoint_torch_gpu.latent_plan import LatentPlanner
from hardpoint_torch_gpu.measured import Measurements
from hardpoint_torch_gpu.mla import TritonMla
from hardpoint_torch_gpu.plan import GpuPlanner
from hardpoint_torch_gpu.pointwise import (
    TritonActivation,
    TritonAddNorm,
    TritonGatedActivation,
    TritonNorm,
    TritonRope,
)
from hardpoint_torch_gpu.rotary_attention import RotaryAttention
from hardpoint_torch_gpu.rounded_input import NormBlock
from hardpoint_torch_gpu.routing import TritonRoute
from hardpoint_torch_gpu.sampling import TritonLogprobs, TritonSample, TritonVerify
from hardpoint_torch_gpu.state_space import TritonConvState, TritonGatedDelta, TritonSsmScan

if TYPE_CHECKING:
    from hardpoint_platforms.device import Device


def triton_providers(
    device: Device, float8: bool = True, measurements: Measurements | None = None
) -> tuple[OpProvider, ...]:
    """One planner for all attention ops of the device. `float8`: whether the device multiplies float8_e4m3fn."""
    planner = GpuPlanner(device.upload)
    attention = TritonAttention(planner)
    linear, mlp = TorchLinear(float8, FewRows(measurements)), EightBitMlp(float8)
    return (
        attention,
        GpuSdpa(device.to_device),
        RotaryAttention(attention),
        TritonMla(LatentPlanner(device.upload)),
        TritonConvState(planner),
        TritonSsmScan(planner),
        TritonGatedDelta(planner),
        linear,
        TorchLogits(),
        TableEmbedding(),
        TritonNorm(),
        TritonAddNorm(),
        TritonRope(),
        TritonActivation(),
        TritonGatedActivation(),
        mlp,
        NormBlock(linear),
        NormBlock(mlp),
        TritonRoute(),
        TritonExperts(float8),
        TritonLora(),
        TritonSample(),
        TritonLogprobs(),
        TritonVerify(),
    )
