"""Linear layers: one projection, or several of the same input run as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hardpoint.layers.op import LayerBuilder, Op, Part, alike, cut, join_rows, on_first_rank
from hardpoint_platforms.program import Weights


class Linear:
    """x [..., in] -> [..., out]."""

    __slots__ = ("_kernel", "_slot")

    def __init__(self, op: Op) -> None:
        self._kernel = op.kernel
        self._slot = op.slot

    def __call__(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        return self._kernel(x, weights[self._slot])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Projection:
    """A linear layer not yet bound: `path` in the checkpoint, output width, weight and bias."""

    path: str
    out_features: int
    weight: Part
    bias: Part | None


def projection(
    build: LayerBuilder,
    path: str,
    in_features: int,
    out_features: int,
    bias: bool | None = False,
    dtype: torch.dtype | None = None,
    rows: Sequence[range] | None = None,
    columns: range | None = None,
) -> Projection:
    """Look a projection up in the checkpoint. `bias` None takes one where there is one.

    rows, columns: those of this rank, where the layer is cut; with `columns` its output is a part of a sum.
    """
    weight = build.weight(f"{path}.weight", (out_features, in_features), dtype)
    offset = build.bias(path, out_features, bias, dtype)
    if rows is not None:
        weight, offset = cut(weight, -2, rows), None if offset is None else cut(offset, -1, rows)
    if columns is not None:
        weight, offset = cut(weight, -1, [columns]), on_first_rank(offset, build.shard)
    return Projection(path, weight.spec.shape[0], weight, offset)


def bind_linear(build: LayerBuilder, part: Projection, dtype: torch.dtype | None = None) -> Linear:
    """Bind one projection; `dtype` is that of its input where it is not the model's."""
    weights = {"weight": part.weight} | ({} if part.bias is None else {"bias": part.bias})
    return Linear(
        build.bind(
            "linear",
            part.path,
            weights,
            dtype,
            in_features=part.weight.spec.shape[1],
            out_features=part.out_features,
            bias=part.bias is not None,
        )
    )


def linear(
    build: LayerBuilder,
    path: str,
    in_features: int,
    out_features: int,
    bias: bool | None = False,
    rows: Sequence[range] | None = None,
    columns: range | None = None,
) -> Linear:
    """Look up and bind one projection."""
    return bind_linear(build, projection(build, path, in_features, out_features, bias, rows=rows, columns=columns))


def fuse(path: str, parts: Sequence[Projection]) -> Projection | None:
    """One projection whose rows are those of `parts`, or None where they are not alike."""
    biases = [part.bias for part in parts if part.bias is not None]
    if not alike([part.weight for part in parts]) or len(biases) not in (0, len(parts)):
        return None
    width = sum(part.out_features for part in parts)
    return Projection(path, width, join_rows([p.weight for p in parts]), join_rows(biases) if biases else None)


class Projections:
    """Several projections of one input, bound as one where their weights are alike, else one by one."""

    __slots__ = ("_linears", "_one", "_sizes")

    def __init__(self, build: LayerBuilder, path: str, parts: Sequence[tuple[Projection, Sequence[int]]]) -> None:
        """`path` names the fused one. `parts` are the checkpoint's, each with the widths of the outputs in it."""
        fused = fuse(path, [part for part, _ in parts])
        self._sizes = [size for _, sizes in parts for size in sizes]
        self._one = None if fused is None else bind_linear(build, fused)
        self._linears: tuple[tuple[Linear, list[int]], ...] = ()
        if fused is None:
            self._linears = tuple((bind_linear(build, part), list(sizes)) for part, sizes in parts)

    def split(self, x: torch.Tensor, weights: Weights) -> Sequence[torch.Tensor]:
        """x [T, in] -> one [T, size] per output."""
        if self._one is not None:
            parts: Sequence[torch.Tensor] = self._one(x, weights).split(self._sizes, -1)
            return parts
        return [part for linear, sizes in self._linears for part in linear(x, weights).split(sizes, -1)]

    def heads(self, x: torch.Tensor, weights: Weights, counts: Sequence[int], width: int) -> Sequence[torch.Tensor]:
        """x [T, in] -> one [T, count, width] per output, where the outputs are heads of `width`.

        Those of one fused projection are views that lie side by side.
        """
        if self._one is not None:
            whole: Sequence[torch.Tensor] = (
                self._one(x, weights).view(x.shape[0], -1, width).split_with_sizes(list(counts), 1)
            )
            return whole
        return [part.reshape(-1, count, width) for part, count in zip(self.split(x, weights), counts, strict=True)]

    def joined(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """x [T, in] -> [T, sum of sizes]."""
        if self._one is not None:
            return self._one(x, weights)
        return torch.cat([linear(x, weights) for linear, _ in self._linears], -1)
