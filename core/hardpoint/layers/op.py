"""How layers bind their ops: once, while the model is built, with the weights' shapes known and no data read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hardpoint.layers.shard import Shard, cut_spec, cut_weight, joined
from hardpoint.models.base import ParameterBook
from hardpoint.models.pieces import Pieces
from hardpoint_platforms.binding import BoundOp, OpTable, Place
from hardpoint_platforms.ops.contract import Kernel, Weight, WeightSpec


@dataclass(frozen=True, slots=True)
class Op:
    """A bound kernel, its slot in the weight tuple (-1: none) and its plan's place in the step's plans (-1: none)."""

    kernel: Kernel
    slot: int
    plan: int


@dataclass(frozen=True)
class Part:
    """One weight argument of an op: what it will look like, and how to read it.

    Two ops that share a `Part` share the loaded weight (tied embeddings, rope tables).
    """

    spec: WeightSpec
    load: Callable[[], Weight | Pieces]


@dataclass(frozen=True)
class Block:
    """An op that a device may have whole.

    Attributes:
        op, where, weights, attrs: of the op.
        parts: the ops that would stand for it, with their places: what people chose for one of them holds for it too.
    """

    op: str
    where: str
    weights: Mapping[str, Part]
    attrs: Mapping[str, Any]
    parts: Sequence[Place] = ()


class LayerBuilder:
    """Hands layers their ops. Paths are relative to `prefix` ("model."), and are what `explain` shows.

    `shard` says which part of the model is built; shapes that layers ask for are the checkpoint's.
    """

    def __init__(
        self, ops: OpTable, book: ParameterBook, dtype: torch.dtype, prefix: str, shard: Shard | None = None
    ) -> None:
        self.dtype = dtype
        self.shard = shard or Shard()
        self._ops = ops
        self._book = book
        self._prefix = prefix

    def has(self, path: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return self._prefix + path in self._book.source

    def weight(self, path: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Part:
        """A checkpoint tensor of exactly this shape, cast to `dtype` (the model's) unless it is quantized.

        Raises WeightsError if it is missing, of another shape, or of a dtype that is not a plain float's.
        """
        return self.absolute(self._prefix + path, shape, dtype)

    def absolute(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Part:
        """Like `weight`, by the full checkpoint name."""
        source, wanted = self._book.source, dtype or self.dtype
        spec = source.require(self._book.use(name), tuple(shape))

        def load() -> Weight:
            loaded = source.load(name)
            return loaded.to(wanted) if isinstance(loaded, torch.Tensor) else loaded

        return Part(replace(spec, dtype=wanted), load)

    def leave(self, path: str) -> None:
        """A checkpoint tensor that another rank loads: it is not reported as unused."""
        self._book.use(self._prefix + path)

    def bias(self, path: str, size: int, wanted: bool | None, dtype: torch.dtype | None = None) -> Part | None:
        """The bias beside a weight: None where the config says so, or says nothing and the checkpoint has none."""
        name = f"{path}.bias"
        if wanted or (wanted is None and self.has(name)):
            return self.weight(name, (size,), dtype)
        return None

    def bind(
        self,
        op: str,
        where: str,
        weights: Mapping[str, Part] | None = None,
        dtype: torch.dtype | None = None,
        **attrs: Any,
    ) -> Op:
        """Bind an op. Raises UnsupportedOperation if nobody takes it."""
        parts = weights or {}
        specs = {name: part.spec for name, part in parts.items()}
        instance = self._ops.contract(op).instance(where, dtype or self.dtype, specs, **attrs)
        return self._slot(self._ops.bind(instance), parts)

    def claim(self, block: Block) -> Op | None:
        """Bind a block, or return None where nobody takes it and the caller decomposes it."""
        specs = {name: part.spec for name, part in block.weights.items()}
        instance = self._ops.contract(block.op).instance(block.where, self.dtype, specs, **block.attrs)
        bound = self._ops.claim(instance, block.parts)
        return None if bound is None else self._slot(bound, block.weights)

    def _slot(self, bound: BoundOp, parts: Mapping[str, Part]) -> Op:
        slot = self._book.add(bound, {name: part.load for name, part in parts.items()}) if parts else -1
        return Op(bound.kernel, slot, bound.plan_index)


def cut(part: Part, axis: int, ranges: Sequence[range]) -> Part:
    """Some rows (axis -2, of biases -1), columns (-1) or experts (-3) of a checkpoint tensor, in order."""
    ranges = joined(ranges)
    if ranges == [range(part.spec.shape[axis])]:
        return part
    spec = cut_spec(part.spec, axis, ranges)

    def load() -> Weight:
        whole = part.load()
        assert not isinstance(whole, Pieces), "a tensor of the checkpoint is one piece"
        return cut_weight(whole, spec, axis, ranges)

    return Part(spec, load)


def on_first_rank(part: Part | None, shard: Shard) -> Part | None:
    """A bias that is added to a sum over ranks: the first one's, zeros on the others."""
    if part is None or shard.rank == 0:
        return part
    spec = part.spec
    return Part(spec, lambda: torch.zeros(spec.shape, dtype=spec.dtype))


def alike(parts: Sequence[Part]) -> bool:
    """Whether the rows of these weights can lie in one tensor."""
    return all(part.spec.scheme == parts[0].spec.scheme for part in parts)


def join_rows(parts: Sequence[Part]) -> Part:
    """One weight of all rows, in order. Quantized ones of unlike schemes become plain."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0].spec
    axis = max(len(first.shape) - 2, 0)
    rows = sum(part.spec.shape[axis] for part in parts)
    shape = (*first.shape[:axis], rows, *first.shape[axis + 1 :])
    scheme = first.scheme if alike(parts) else None
    if scheme is not None and any(part.spec.shape[axis] % scheme.group_rows for part in parts[:-1]):
        scheme = replace(scheme, group_rows=1)  # blocks of scales would not lie where the rows do
    spec = WeightSpec(shape, first.dtype, scheme)
    return Part(spec, lambda: Pieces(spec, [part.load() for part in parts], torch.cat, axis - len(shape)))


def stack(parts: Sequence[Part]) -> Part:
    """One weight with a new first axis: experts that the checkpoint holds one by one."""
    first = parts[0].spec
    spec = WeightSpec((len(parts), *first.shape), first.dtype, first.scheme if alike(parts) else None)
    return Part(spec, lambda: Pieces(spec, [part.load() for part in parts], torch.stack, 0))
