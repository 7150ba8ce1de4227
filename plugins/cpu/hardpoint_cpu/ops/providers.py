"""The processor's op providers, best first."""

from __future__ import annotations

from hardpoint_cpu.ops.dense import CpuEmbedding, CpuLinear, CpuLogits
from hardpoint_cpu.ops.pointwise import CpuActivation, CpuAddNorm, CpuGatedActivation, CpuNorm, CpuRope
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.reference.sdpa import SdpaAttention


def cpu_providers(blocked: bool = False) -> tuple[OpProvider, ...]:
    """A fresh set: each op table gets an attention planner of its own. `blocked`: lay fp32 weights out in blocks."""
    return (
        SdpaAttention(),
        CpuLinear(blocked),
        CpuLogits(blocked),
        CpuEmbedding(),
        CpuNorm(),
        CpuAddNorm(),
        CpuRope(),
        CpuActivation(),
        CpuGatedActivation(),
    )
