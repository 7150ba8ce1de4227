"""The output projection."""

from __future__ import annotations

import torch

from hardpoint.layers.op import LayerBuilder, Part
from hardpoint_platforms.program import Weights


class Logits:
    """Hidden states [R, hidden_size] -> float32 [R, vocab_size]; where the rows are dealt out, ranks collect theirs."""

    __slots__ = ("_dealt", "_kernel", "_slot")

    def __init__(self, build: LayerBuilder, path: str, table: Part, vocab_size: int, softcap: float | None) -> None:
        op = build.bind("logits", path, {"weight": table}, softcap=softcap)
        self._kernel = op.kernel
        self._slot = op.slot
        self._dealt = build.shard if table.spec.shape[0] < vocab_size else None

    def __call__(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        logits: torch.Tensor = self._kernel(hidden, weights[self._slot])
        return logits if self._dealt is None else self._dealt.gather(logits)
