"""Attention of projected heads: norms of heads, rotation and the paged op, claimed whole or one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.layers.embedding import Ropes
from hardpoint.layers.norm import Norm
from hardpoint.layers.op import Block, LayerBuilder, Op, Part
from hardpoint.models.spec import AttentionSpec, Names
from hardpoint_platforms.binding import Place
from hardpoint_platforms.program import Weights
from hardpoint_platforms.state_cache import State

#: q [T, h, d], k and v [T, hk, d].
Heads = Sequence[torch.Tensor]


class RotaryBlock:
    """All of it as one op."""

    __slots__ = ("_kernel", "_plan", "_slot")

    def __init__(self, op: Op) -> None:
        self._kernel, self._plan, self._slot = op.kernel, op.plan, op.slot

    def __call__(
        self, heads: Heads, positions: torch.Tensor, plans: tuple[Any, ...], state: State, weights: Weights
    ) -> tuple[torch.Tensor, State]:
        plan = plans[self._plan] if self._plan >= 0 else None
        return self._kernel(*heads, positions, state, plan, weights[self._slot])  # type: ignore[no-any-return]


class RotaryParts:
    """An op for each part that the model has."""

    __slots__ = ("_attend", "_k_norm", "_plan", "_q_norm", "_rope", "_rope_slot")

    def __init__(self, q_norm: Norm | None, k_norm: Norm | None, rope: Op | None, attend: Op) -> None:
        self._q_norm, self._k_norm = q_norm, k_norm
        self._rope = None if rope is None else rope.kernel
        self._rope_slot = -1 if rope is None else rope.slot
        self._attend, self._plan = attend.kernel, attend.plan

    def __call__(
        self, heads: Heads, positions: torch.Tensor, plans: tuple[Any, ...], state: State, weights: Weights
    ) -> tuple[torch.Tensor, State]:
        q, k, v = heads
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q, weights), self._k_norm(k, weights)
        if self._rope is not None:
            q, k = self._rope(q, k, positions, weights[self._rope_slot])
        plan = plans[self._plan] if self._plan >= 0 else None
        return self._attend(q, k, v, state, plan)  # type: ignore[no-any-return]


def rotary_attention(
    build: LayerBuilder, path: str, spec: AttentionSpec, names: Names, ropes: Ropes, attrs: dict[str, Any]
) -> RotaryBlock | RotaryParts:
    """Bind (q, k, v) -> (out [T, h, d], state). `attrs`: those of the attention op."""
    block = _claim(build, path, spec, names, ropes, attrs)
    if block is not None:
        return RotaryBlock(block)
    q_norm, k_norm = (
        None if spec.qk_norm is None else Norm(build, where, spec.head_dim, spec.qk_norm)
        for where in _norms(path, names)
    )
    rope = None if spec.rope is None else ropes.bind(spec.rope)
    return RotaryParts(q_norm, k_norm, rope, build.bind("attention", path, **attrs))


def _claim(
    build: LayerBuilder, path: str, spec: AttentionSpec, names: Names, ropes: Ropes, attrs: dict[str, Any]
) -> Op | None:
    """The block rotates, and its norms have no biases."""
    if spec.rope is None:
        return None
    weights: dict[str, Part] = {"table": ropes.table(spec.rope)}
    parts: list[Place] = []
    if spec.qk_norm is not None:
        for name, where in zip(("q_norm", "k_norm"), _norms(path, names), strict=True):
            if spec.qk_norm.kind == "ln" and build.has(f"{where}.bias"):
                return None
            weights[name] = build.weight(f"{where}.weight", (spec.head_dim,))
            parts.append(("norm", where))
        attrs = {**attrs, "norm": spec.qk_norm.kind, "eps": spec.qk_norm.eps}
    parts += [("rope", ropes.where(spec.rope)), ("attention", path)]
    attrs = {**attrs, "rotary_dim": spec.rope.rotary_dim, "interleaved": spec.rope.interleaved}
    return build.claim(Block("rotary_attention", path, weights, attrs, parts))


def _norms(path: str, names: Names) -> tuple[str, str]:
    return f"{path}.{names.q_norm}", f"{path}.{names.k_norm}"
