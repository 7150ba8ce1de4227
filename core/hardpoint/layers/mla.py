"""Multi-head latent attention: the cache keeps one latent and one rotated key per token, shared by all heads."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.layers.embedding import Ropes
from hardpoint.layers.linear import Projections, linear, projection
from hardpoint.layers.norm import Entry, Norm
from hardpoint.layers.op import LayerBuilder, cut
from hardpoint.layers.shard import Shard, scaled
from hardpoint.models.spec import LatentAttentionSpec, Names
from hardpoint_platforms.program import Weights
from hardpoint_platforms.state_cache import LayerCache, State


def cache_of(spec: LatentAttentionSpec, _: Shard) -> LayerCache:
    """The latent and the rotated key per token: all heads share them, so each rank has them."""
    return LayerCache((("latent", 1, spec.latent_dim), ("rope_key", 1, spec.rope_dim)))


class LatentAttention:
    """x [T, hidden] -> [T, hidden], and the state with the new tokens' latents and rotated keys.

    A rank's output is that of its heads: a part of a sum.
    """

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
        before: Entry,
    ) -> None:
        """`place` is the layer's cache group and its place among the pool layers; `before` the norm, bound here."""
        mine = build.shard.mine(spec.heads, "attention heads")
        heads, head = len(mine), spec.nope_dim + spec.rope_dim
        self._heads, self._nope, self._rope_dim = heads, spec.nope_dim, spec.rope_dim
        self._width = heads * spec.v_head_dim
        query, rows = spec.heads * head, scaled([mine], head)
        latent = [spec.latent_dim, spec.rope_dim]
        if spec.q_lora is None:
            first = projection(build, f"{path}.{names.q}", hidden, query, rows=rows)
        else:
            first = projection(build, f"{path}.q_a_proj", hidden, spec.q_lora, spec.down_bias)
        parts = [
            (first, [first.out_features]),
            (projection(build, f"{path}.kv_a_proj_with_mqa", hidden, sum(latent), spec.down_bias), latent),
        ]
        self._down = Projections(build, f"{path}.q_kv_a_proj", parts, before)
        self._q_norm = self._q_up = None
        if spec.q_lora is not None:
            self._q_norm = Norm(build, f"{path}.q_a_layernorm", spec.q_lora, spec.latent_norm)
            self._q_up = linear(build, f"{path}.q_b_proj", spec.q_lora, query, rows=rows)
        self._kv_norm = Norm(build, f"{path}.kv_a_layernorm", spec.latent_dim, spec.latent_norm)
        rope = ropes.bind(spec.rope)
        self._rope, self._rope_slot = rope.kernel, rope.slot
        up = spec.nope_dim + spec.v_head_dim
        whole = build.weight(f"{path}.kv_b_proj.weight", (spec.heads * up, spec.latent_dim))
        attend = build.bind(
            "mla_attention",
            path,
            {"kv_b": cut(whole, -2, scaled([mine], up))},
            heads=heads,
            nope_dim=spec.nope_dim,
            rope_dim=spec.rope_dim,
            v_head_dim=spec.v_head_dim,
            latent_dim=spec.latent_dim,
            scale=spec.scale,
            group=place[0],
            pool_layer=place[1],
        )
        self._attend, self._plan, self._slot = attend.kernel, attend.plan, attend.slot
        (columns,) = scaled([mine], spec.v_head_dim)
        inputs = spec.heads * spec.v_head_dim
        self._out = linear(build, f"{path}.{names.o}", inputs, hidden, spec.out_bias, columns=columns)

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
