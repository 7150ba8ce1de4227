"""Grouped-query attention: projections, head norms, rotation, and the paged attention op."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.layers.embedding import Ropes
from hardpoint.layers.linear import Projections, linear, projection
from hardpoint.layers.norm import Norm
from hardpoint.layers.op import LayerBuilder
from hardpoint.models.spec import AttentionSpec, Names
from hardpoint_platforms.program import Weights
from hardpoint_platforms.state_cache import LayerCache, State


def cache_of(spec: AttentionSpec) -> LayerCache:
    """Keys and values per token."""
    return LayerCache((("k", spec.kv_heads, spec.head_dim), ("v", spec.kv_heads, spec.head_dim)))


class Attention:
    """x [T, hidden] -> [T, hidden], and the state with the new tokens' keys and values."""

    __slots__ = (
        "_attend",
        "_counts",
        "_head_dim",
        "_k_norm",
        "_out",
        "_plan",
        "_q_norm",
        "_qkv",
        "_rope",
        "_rope_slot",
        "_width",
    )

    def __init__(
        self,
        build: LayerBuilder,
        path: str,
        hidden: int,
        spec: AttentionSpec,
        names: Names,
        ropes: Ropes,
        place: tuple[int, int],
    ) -> None:
        """`place` is the layer's cache group and its place among the pool layers."""
        self._counts, self._head_dim = (spec.heads, spec.kv_heads, spec.kv_heads), spec.head_dim
        self._width = spec.heads * spec.head_dim
        self._qkv = _qkv(build, path, hidden, spec, names)
        self._q_norm = self._k_norm = None
        if spec.qk_norm is not None:
            self._q_norm = Norm(build, f"{path}.{names.q_norm}", spec.head_dim, spec.qk_norm)
            self._k_norm = Norm(build, f"{path}.{names.k_norm}", spec.head_dim, spec.qk_norm)
        rope = None if spec.rope is None else ropes.bind(spec.rope)
        self._rope = None if rope is None else rope.kernel
        self._rope_slot = -1 if rope is None else rope.slot
        attend = build.bind(
            "attention",
            path,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.head_dim,
            scale=spec.scale,
            group=place[0],
            pool_layer=place[1],
            window=spec.window,
            softcap=spec.softcap,
        )
        self._attend, self._plan = attend.kernel, attend.plan
        self._out = linear(build, f"{path}.{names.o}", self._width, hidden, spec.out_bias)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, plans: tuple[Any, ...], state: State, weights: Weights
    ) -> tuple[torch.Tensor, State]:
        q, k, v = self._qkv.heads(x, weights, self._counts, self._head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q, weights), self._k_norm(k, weights)
        if self._rope is not None:
            q, k = self._rope(q, k, positions, weights[self._rope_slot])
        plan = plans[self._plan] if self._plan >= 0 else None
        out, state = self._attend(q, k, v, state, plan)
        return self._out(out.reshape(-1, self._width), weights), state


def _qkv(build: LayerBuilder, path: str, hidden: int, spec: AttentionSpec, names: Names) -> Projections:
    sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    fused = f"{path}.{names.qkv or 'qkv_proj'}"
    if names.qkv is not None:
        return Projections(build, fused, [(projection(build, fused, hidden, sum(sizes), spec.qkv_bias), sizes)])
    parts = [
        (projection(build, f"{path}.{name}", hidden, size, spec.qkv_bias), [size])
        for name, size in zip((names.q, names.k, names.v), sizes, strict=True)
    ]
    return Projections(build, fused, parts)
