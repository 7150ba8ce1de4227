"""Grouped-query attention: projections, and between them what `rotary_attention` binds."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.layers.embedding import Ropes
from hardpoint.layers.linear import Projections, linear, projection
from hardpoint.layers.norm import Entry
from hardpoint.layers.op import LayerBuilder
from hardpoint.layers.rotary_attention import rotary_attention
from hardpoint.layers.shard import Shard, after, scaled
from hardpoint.models.spec import AttentionSpec, Names
from hardpoint_platforms.program import Weights
from hardpoint_platforms.state_cache import LayerCache, State


def cache_of(spec: AttentionSpec, shard: Shard) -> LayerCache:
    """Keys and values per token, of this rank's heads."""
    heads = len(shard.kv_heads(spec.kv_heads))
    return LayerCache((("k", heads, spec.head_dim), ("v", heads, spec.head_dim)))


class Attention:
    """x [T, hidden] -> [T, hidden], and the state with the new tokens' keys and values.

    A rank's output is that of its heads: a part of a sum.
    """

    __slots__ = ("_attend", "_counts", "_head_dim", "_out", "_qkv", "_width")

    def __init__(
        self,
        build: LayerBuilder,
        path: str,
        hidden: int,
        spec: AttentionSpec,
        names: Names,
        ropes: Ropes,
        place: tuple[int, int],
        before: Entry,
    ) -> None:
        """`place` is the layer's cache group and its place among the pool layers; `before` the norm, bound here."""
        mine = build.shard.mine(spec.heads, "attention heads")
        heads, kv_heads = len(mine), len(build.shard.kv_heads(spec.kv_heads))
        self._counts, self._head_dim = (heads, kv_heads, kv_heads), spec.head_dim
        self._width = heads * spec.head_dim
        self._qkv = _qkv(build, path, hidden, spec, names, before)
        attrs = {
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": spec.head_dim,
            "v_head_dim": spec.head_dim,
            "scale": spec.scale,
            "group": place[0],
            "pool_layer": place[1],
            "window": spec.window,
            "softcap": spec.softcap,
        }
        self._attend = rotary_attention(build, path, spec, names, ropes, attrs)
        whole, (columns,) = spec.heads * spec.head_dim, scaled([mine], spec.head_dim)
        self._out = linear(build, f"{path}.{names.o}", whole, hidden, spec.out_bias, columns=columns)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, plans: tuple[Any, ...], state: State, weights: Weights
    ) -> tuple[torch.Tensor, State]:
        heads = self._qkv.heads(x, weights, self._counts, self._head_dim)
        out, state = self._attend(heads, positions, plans, state, weights)
        return self._out(out.reshape(-1, self._width), weights), state


def _qkv(build: LayerBuilder, path: str, hidden: int, spec: AttentionSpec, names: Names, before: Entry) -> Projections:
    whole = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    kv = build.shard.kv_heads(spec.kv_heads)
    mine = scaled([build.shard.mine(spec.heads, "attention heads"), kv, kv], spec.head_dim)
    sizes = list(map(len, mine))
    fused = f"{path}.{names.qkv or 'qkv_proj'}"
    if names.qkv is not None:
        starts = (0, whole[0], whole[0] + whole[1])
        rows = [after(start, part) for start, part in zip(starts, mine, strict=True)]
        one = projection(build, fused, hidden, sum(whole), spec.qkv_bias, rows=rows)
        return Projections(build, fused, [(one, sizes)], before)
    parts = [
        (projection(build, f"{path}.{name}", hidden, size, spec.qkv_bias, rows=[rows]), [len(rows)])
        for name, size, rows in zip((names.q, names.k, names.v), whole, mine, strict=True)
    ]
    return Projections(build, fused, parts, before)
