"""How attention scores are made, apart from the dot product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch


@dataclass(frozen=True)
class ScoreRule:
    """Attributes of one attention op. `alibi`: a slope per query head."""

    scale: float
    window: int | None
    softcap: float | None
    alibi: tuple[float, ...] | None
    _slopes: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Self:
        """From the attributes of an op instance."""
        return cls(attrs["scale"], attrs["window"], attrs["softcap"], attrs["alibi"])

    @property
    def same_for_all(self) -> bool:
        """Whether how far a query is from a key decides nothing: queries of several rows may share a step."""
        return self.window is None and self.alibi is None

    def slopes(self, device: torch.device) -> torch.Tensor:
        """float32 [h]; made once, as a step may not make it from host numbers."""
        if device not in self._slopes:
            self._slopes[device] = torch.tensor(self.alibi or (0.0,), dtype=torch.float32, device=device)
        return self._slopes[device]
