"""Weights that a checkpoint holds in pieces: q, k and v of one projection, experts one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from hardpoint.errors import WeightsError
from hardpoint_platforms.ops.contract import Weight, WeightSpec
from hardpoint_platforms.quant import QuantTensor


@dataclass(frozen=True)
class Pieces:
    """A weight read in pieces, not yet joined: where a device has memory of its own, they are joined there.

    Attributes:
        spec: of the whole. Without a scheme, quantized pieces become plain; where its rows have scales of their own and
            those of the pieces share them (blocks that do not end where pieces do), they are repeated.
        pieces: in order.
        combine: torch.cat or torch.stack, along `axis`.
    """

    spec: WeightSpec
    pieces: Sequence[Weight | Pieces]
    combine: Callable[[list[torch.Tensor], int], torch.Tensor]
    axis: int

    def join(self, put: Callable[[Weight], Weight] = lambda piece: piece) -> Weight:
        """The whole. `put`: brings a piece to where it is joined. Raises WeightsError where pieces are not alike."""
        scheme = self.spec.scheme
        weights: list[Weight] = []
        for piece in self.pieces:
            whole = piece.join(put) if isinstance(piece, Pieces) else piece
            if scheme is None and isinstance(whole, QuantTensor):
                whole = whole.dequantize(self.spec.dtype)
            weights.append(whole if isinstance(piece, Pieces) else put(whole))
        if scheme is None:
            return self.combine([weight for weight in weights if isinstance(weight, torch.Tensor)], self.axis)
        quantized = [weight for weight in weights if isinstance(weight, QuantTensor)]
        if len(quantized) < len(weights):
            raise WeightsError(f"weights announced as {scheme.name} were read as plain ones")
        if scheme.group_rows == 1:
            quantized = [weight.with_row_scales() for weight in quantized]
        first = quantized[0]
        parts: dict[str, Any] = {}
        for part in fields(QuantTensor):
            if part.name in ("scheme", "shape", "codebook") or getattr(first, part.name) is None:
                continue
            parts[part.name] = self.combine([getattr(weight, part.name) for weight in quantized], self.axis)
        return QuantTensor(scheme=scheme, shape=self.spec.shape, codebook=first.codebook, **parts)
