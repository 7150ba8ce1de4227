"""Multi-head latent attention: the cache keeps one latent and one rotated key per token, shared by all heads."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.layers.embedding import Ropes
from hardpoint.layers.linear import Projections, linear, projection
from hardpoint.layers.norm import Norm
from hardpoint.layers.op import LayerBuilder
from hardpoint.models.spec import LatentAttentionSpec, Names
from hardpoint_platforms.program import Weights
from hardpoint_platforms.state_cache import LayerCache, State


def cache_of(spec: LatentAttentionSpec) -> LayerCache:
    """The latent and the rotated key per token."""
    return LayerCache((("latent", 1, spec.latent_dim), ("rope_key", 1, spec.rope_dim)))


class LatentAttention:
    """x [T, hidden] -> [T, hidden], and the state with the new tokens' latents and rotated keys."""

    __slots__ = (
        "_attend",
        "_down",
        "_heads",
        "_kv_norm",
        "_nope",
        "_out",
        "_plan",
        "_q_norm",
        "_q_up",
        "_rope",
        "_rope_dim",
        "_rope_slot",
        "_slot",
        "_width",
    )

    def __init__(
        self,
        build: LayerBuilder,
        path: str,
        hidden: int,
        spec: LatentAttentionSpec,
        names: Names,
        ropes: Ropes,
        place: tuple[int, int],
    ) -> None:
        """`place` is the layer's cache group and its place among the pool layers."""
        self._heads, self._nope, self._rope_dim = spec.heads, spec.nope_dim, spec.rope_dim
        self._width = spec.heads * spec.v_head_dim
        query = spec.heads * (spec.nope_dim + spec.rope_dim)
        first, first_bias = (names.q, False) if spec.q_lora is None else ("q_a_proj", spec.down_bias)
        width = spec.q_lora or query
        latent = [spec.latent_dim, spec.rope_dim]
        parts = [
            (projection(build, f"{path}.{first}", hidden, width, first_bias), [width]),
            (projection(build, f"{path}.kv_a_proj_with_mqa", hidden, sum(latent), spec.down_bias), latent),
        ]
        self._down = Projections(build, f"{path}.q_kv_a_proj", parts)
        self._q_norm = self._q_up = None
        if spec.q_lora is not None:
            self._q_norm = Norm(build, f"{path}.q_a_layernorm", spec.q_lora, spec.latent_norm)
            self._q_up = linear(build, f"{path}.q_b_proj", spec.q_lora, query)
        self._kv_norm = Norm(build, f"{path}.kv_a_layernorm", spec.latent_dim, spec.latent_norm)
        rope = ropes.bind(spec.rope)
        self._rope, self._rope_slot = rope.kernel, rope.slot
        up = spec.heads * (spec.nope_dim + spec.v_head_dim)
        attend = build.bind(
            "mla_attention",
            path,
            {"kv_b": build.weight(f"{path}.kv_b_proj.weight", (up, spec.latent_dim))},
            heads=spec.heads,
            nope_dim=spec.nope_dim,
            rope_dim=spec.rope_dim,
            v_head_dim=spec.v_head_dim,
            latent_dim=spec.latent_dim,
            scale=spec.scale,
            group=place[0],
            pool_layer=place[1],
        )
        self._attend, self._plan, self._slot = attend.kernel, attend.plan, attend.slot
        self._out = linear(build, f"{path}.{names.o}", self._width, hidden, spec.out_bias)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, plans: tuple[Any, ...], state: State, weights: Weights
    ) -> tuple[torch.Tensor, State]:
        q, latent, key = self._down.split(x, weights)
        if self._q_norm is not None and self._q_up is not None:
            q = self._q_up(self._q_norm(q, weights), weights)
        q_nope, q_rope = q.view(-1, self._heads, self._nope + self._rope_dim).split((self._nope, self._rope_dim), -1)
        latent = self._kv_norm(latent, weights)
        q_rope, keys = self._rope(q_rope, key.unsqueeze(1), positions, weights[self._rope_slot])
        plan = plans[self._plan] if self._plan >= 0 else None
        out, state = self._attend(q_nope, q_rope, latent, keys.squeeze(1), state, plan, weights[self._slot])
        return self._out(out.reshape(-1, self._width), weights), state
