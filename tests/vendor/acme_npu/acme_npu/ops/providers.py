"""Every provider of the plugin."""

from __future__ import annotations

from typing import Any

from acme_npu.ops.attention import Attention, LatentAttention
from acme_npu.ops.dense import Embedding, Linear, Logits
from acme_npu.ops.moe import Experts, Route
from acme_npu.ops.plan import AcmePlanner
from acme_npu.ops.pointwise import AddNorm, GatedActivation, Norm, Rope
from acme_npu.ops.sampling import Sample, Score
from acme_npu.ops.state_space import ConvState, GatedDelta, SsmScan
from hardpoint_platforms.ops.provider import OpProvider

_PLAIN = (Embedding, Linear, Norm, AddNorm, Rope, GatedActivation, Route, Experts, Logits, Sample, Score)
_PAGED = (Attention, LatentAttention, ConvState, SsmScan, GatedDelta)


def all_providers(fault: str = "") -> tuple[OpProvider, ...]:
    """One per op; those that read pages share a planner."""
    planner = AcmePlanner(fault)
    plain: list[type[Any]] = list(_PLAIN)
    if fault == "missing_method":
        plain[plain.index(Rope)] = _without_build()
    if fault == "wrong_signature":
        plain[plain.index(Norm)] = type("Norm", (Norm,), {"supports": lambda self: True})
    return (*(kind(fault) for kind in plain), *(kind(planner, fault) for kind in _PAGED))


def _without_build() -> type[Any]:
    """The fault `missing_method`: a provider that forgot what OpProvider asks for."""

    class Rope(OpProvider):
        op, name = "rope", "acme rope"

        def __init__(self, fault: str) -> None:
            raise TypeError("never made: its abstract methods are missing")

    return Rope
