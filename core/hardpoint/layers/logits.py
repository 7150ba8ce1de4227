"""The output projection."""

from __future__ import annotations

import torch

from hardpoint.layers.op import LayerBuilder, Part
from hardpoint_platforms.program import Weights


class Logits:
    """Hidden states [R, hidden_size] -> float32 [R, vocab_size]."""

    __slots__ = ("_kernel", "_slot")

    def __init__(self, build: LayerBuilder, path: str, table: Part, softcap: float | None) -> None:
        op = build.bind("logits", path, {"weight": table}, softcap=softcap)
        self._kernel = op.kernel
        self._slot = op.slot

    def __call__(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        return self._kernel(hidden, weights[self._slot])  # type: ignore[no-any-return]
