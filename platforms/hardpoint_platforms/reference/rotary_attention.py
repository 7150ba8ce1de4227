"""Norms of heads, rotation and paged attention as a block, spelled in the reference's own ops. For tests."""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.reference.attention import build_attention
from hardpoint_platforms.reference.norm import normalize
from hardpoint_platforms.reference.plan import ReferencePlan
from hardpoint_platforms.reference.rotary import build_rope
from hardpoint_platforms.state_cache import State


def build_rotary_attention(instance: OpInstance) -> Kernel:
    """rotary_attention(q[T, h, d], k, v[T, hk, dv], positions[T], state, plan, w) -> (out[T, h, dv], state)."""
    kind, eps = instance.attrs["norm"], instance.attrs["eps"]
    rope, attention = build_rope(instance), build_attention(instance)

    def rotary_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        state: State,
        plan: ReferencePlan,
        w: Packed,
    ) -> tuple[torch.Tensor, State]:
        named = dict(zip(instance.weights, w, strict=True))
        if kind is not None:
            q, k = (
                normalize(x, (named[name],) if name in named else (), kind, eps)
                for x, name in ((q, "q_norm"), (k, "k_norm"))
            )
        q, k = rope(q, k, positions, (named["table"],))
        sinks = (named["sinks"],) if "sinks" in named else ()
        out, state = attention(q, k, v, state, plan, sinks)
        return out, state

    return rotary_attention
