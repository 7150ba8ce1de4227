"""The token embedding, and the rotary tables that layers share."""

from __future__ import annotations

import torch

from hardpoint.layers.op import LayerBuilder, Op, Part
from hardpoint.models.rope import rope_table
from hardpoint.models.spec import RopeSpec
from hardpoint_platforms.ops.contract import WeightSpec
from hardpoint_platforms.program import Weights


class Embedding:
    """Token ids int64 [T] -> [T, hidden_size]. Where the rows are dealt out, each rank looks its own up."""

    __slots__ = ("_dealt", "_kernel", "_rows", "_slot")

    def __init__(self, build: LayerBuilder, path: str, table: Part, vocab_size: int, scale: float) -> None:
        # The scale is rounded to the model's dtype, as the models were trained (Gemma in bf16: 55.4256 -> 55.5).
        rounded = torch.tensor(scale, dtype=build.dtype).item()
        op = build.bind("embedding", path, {"weight": table}, scale=rounded)
        self._kernel = op.kernel
        self._slot = op.slot
        self._rows = table.spec.shape[0]
        self._dealt = build.shard if self._rows < vocab_size else None

    def __call__(self, token_ids: torch.Tensor, weights: Weights) -> torch.Tensor:
        if self._dealt is None:
            return self._kernel(token_ids, weights[self._slot])  # type: ignore[no-any-return]
        places, here = self._dealt.own(token_ids, self._rows)
        return self._dealt.sum(torch.where(here[:, None], self._kernel(places, weights[self._slot]), 0))


class Ropes:
    """Binds each distinct rope of a model once, or gives blocks its table of `positions` rows."""

    def __init__(self, build: LayerBuilder, positions: int) -> None:
        self._build = build
        self._positions = positions
        self._tables: dict[RopeSpec, Part] = {}
        self._bound: dict[RopeSpec, Op] = {}

    def table(self, spec: RopeSpec) -> Part:
        """The table of `spec`, float32 [positions, rotary_dim]; layers alike share it."""
        if spec not in self._tables:
            shape = (self._positions, spec.rotary_dim)
            self._tables[spec] = Part(WeightSpec(shape, torch.float32), lambda: rope_table(spec, self._positions))
        return self._tables[spec]

    def where(self, spec: RopeSpec) -> str:
        """Its place in the model: ropes are numbered in the order in which layers ask for them."""
        self.table(spec)
        number = list(self._tables).index(spec)
        return f"rotary_emb.{number}" if number else "rotary_emb"

    def bind(self, spec: RopeSpec) -> Op:
        """The op of `spec`; layers alike share it."""
        if spec not in self._bound:
            self._bound[spec] = self._build.bind(
                "rope",
                self.where(spec),
                {"table": self.table(spec)},
                rotary_dim=spec.rotary_dim,
                interleaved=spec.interleaved,
            )
        return self._bound[spec]
