"""Linear layers: one projection, or several of the same input run as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.layers.norm import Entry, done
from hardpoint.layers.op import Block, LayerBuilder, Op, Part, alike, cut, join_rows, on_first_rank
from hardpoint_platforms.program import Weights

#: x [..., in] and the weights -> [..., out].
Product = Callable[[torch.Tensor, Weights], torch.Tensor]


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

    @property
    def weights(self) -> dict[str, Part]:
        """As `linear` names them."""
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    @property
    def attrs(self) -> dict[str, Any]:
        """Of `linear`."""
        inputs = self.weight.spec.shape[1]
        return {"in_features": inputs, "out_features": self.out_features, "bias": self.bias is not None}


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
    return Linear(build.bind("linear", part.path, part.weights, dtype, **part.attrs))


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


def _behind(build: LayerBuilder, part: Projection, before: Entry | None) -> Product:
    """One projection; where a device has the norm before it in one op with it, what that op left to do: nothing."""
    if before is None:
        return bind_linear(build, part)
    if before.claim(build, Block("linear", part.path, part.weights, part.attrs)):
        return done
    before.bind(build)
    return bind_linear(build, part)


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

    def __init__(
        self,
        build: LayerBuilder,
        path: str,
        parts: Sequence[tuple[Projection, Sequence[int]]],
        before: Entry | None = None,
    ) -> None:
        """`path` names the fused one. `parts` are the checkpoint's, each with the widths of the outputs in it.

        before: the norm of their input, which becomes one op with the fused one where a device has that; bound here.
        """
        fused = fuse(path, [part for part, _ in parts])
        self._sizes = [size for _, sizes in parts for size in sizes]
        self._one: Product | None = None
        self._linears: tuple[tuple[Linear, list[int]], ...] = ()
        if fused is not None:
            self._one = _behind(build, fused, before)
        else:
            if before is not None:
                before.bind(build)
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
