"""The native providers of one device, best first."""

from __future__ import annotations

from hardpoint_cpu.native.attention import NativeAttention, NativeLatentAttention
from hardpoint_cpu.native.attention_plan import NativePlanner
from hardpoint_cpu.native.dense import NativeEmbedding, NativeLinear, NativeLogits
from hardpoint_cpu.native.moe import NativeExperts, NativeRoute
from hardpoint_cpu.native.pointwise import (
    NativeActivation,
    NativeAddNorm,
    NativeGatedActivation,
    NativeNorm,
    NativeRope,
)
from hardpoint_cpu.native.provider import Setting
from hardpoint_cpu.native.sampling import NativeLogprobs, NativeSample
from hardpoint_cpu.native.state_space import NativeConvState, NativeGatedDelta, NativeLora, NativeSsmScan
from hardpoint_platforms.ops.provider import OpProvider


def native_providers(setting: Setting) -> tuple[OpProvider, ...]:
    """A fresh set with a planner of its own."""
    planner = NativePlanner()
    return (
        NativeAttention(setting, planner),
        NativeLatentAttention(setting, planner),
        NativeLinear(setting),
        NativeLogits(setting),
        NativeEmbedding(setting),
        NativeNorm(setting),
        NativeAddNorm(setting),
        NativeRope(setting),
        NativeActivation(setting),
        NativeGatedActivation(setting),
        NativeRoute(setting),
        NativeExperts(setting),
        NativeLora(setting),
        NativeConvState(setting, planner),
        NativeSsmScan(setting, planner),
        NativeGatedDelta(setting, planner),
        NativeSample(setting),
        NativeLogprobs(setting),
    )
