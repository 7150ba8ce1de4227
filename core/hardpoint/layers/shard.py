"""One rank's part of a model that is cut over several: tensor parallelism (Megatron-LM, Shoeybi et al. 2019), whole
experts where wanted.

    q, k, v, gate, up, experts   rows of this rank's heads, columns of the block, experts
    o, down                      columns of the same; what ranks compute is a part of a sum: `Shard.sum`
    embedding, logits            rows of this rank's tokens, where the vocabulary can be dealt out evenly

Norms, routers, latents and whatever else is small are the same on every rank. Layers never see a rank's number: on a
device that runs all ranks as one program it is known there alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from hardpoint.errors import ConfigError
from hardpoint_platforms.communication import TENSOR_AXIS, Communicator
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.contract import Weight, WeightSpec
from hardpoint_platforms.quant import QuantScheme, QuantTensor


@dataclass(frozen=True)
class Shard:
    """Which part this is.

    Attributes:
        rank, count: of the ranks along `TENSOR_AXIS`.
        whole_experts: each rank has some of the experts instead of a part of each.
        communicator: collectives of the step; None where there is one rank.
    """

    rank: int = 0
    count: int = 1
    whole_experts: bool = False
    communicator: Communicator | None = None

    @classmethod
    def on(cls, device: Device, rank: int, whole_experts: bool) -> Shard:
        """The part of one of the ranks that a device runs."""
        mesh = device.mesh
        count = mesh.size(TENSOR_AXIS)
        return cls(rank, count, whole_experts, device.communicator(mesh, rank, "") if count > 1 else None)

    def share(self, size: int, what: str) -> int:
        """This rank's equal part of `size`. Raises ConfigError where there is none; `what`: "attention heads"."""
        if size % self.count:
            fitting = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
            raise ConfigError(
                f"--tensor-parallel-size {self.count} cannot deal out {size} {what}",
                hint=f"sizes that can: {fitting}",
            )
        return size // self.count

    def deals(self, size: int) -> bool:
        """Whether `size` rows are dealt out; else each rank has them all."""
        return self.count > 1 and size % self.count == 0

    def mine(self, size: int, what: str) -> range:
        """This rank's rows of `size`. Raises ConfigError as `share` does."""
        part = self.share(size, what)
        return range(self.rank * part, (self.rank + 1) * part)

    def kv_heads(self, size: int) -> range:
        """This rank's key and value heads; where there are more ranks than heads, several ranks have the same one."""
        if size % self.count and self.count % size == 0:
            first = self.rank * size // self.count
            return range(first, first + 1)
        return self.mine(size, "key and value heads")

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """What the ranks computed in parts, added up."""
        return x if self.communicator is None else self.communicator.all_reduce(x, TENSOR_AXIS)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' last dimensions side by side."""
        return x if self.communicator is None else self.communicator.all_gather(x, TENSOR_AXIS, x.dim() - 1)

    def own(self, ids: torch.Tensor, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [...] of things of which each rank has `part`: their places here (0 for others'), and which are here."""
        assert self.communicator is not None, "only a model that is cut asks"
        places = ids - self.communicator.index(TENSOR_AXIS).to(ids.dtype) * part
        here = (places >= 0) & (places < part)
        return torch.where(here, places, 0), here


def scaled(ranges: Sequence[range], width: int) -> list[range]:
    """Ranges of heads as ranges of rows, `width` each."""
    return [range(part.start * width, part.stop * width) for part in ranges]


def after(offset: int, part: range) -> range:
    """A range that begins `offset` later."""
    return range(offset + part.start, offset + part.stop)


def joined(ranges: Sequence[range]) -> list[range]:
    """The same numbers in as few ranges."""
    found: list[range] = []
    for part in ranges:
        if found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
    return found


def cut_spec(spec: WeightSpec, axis: int, ranges: Sequence[range]) -> WeightSpec:
    """What `cut_weight` gives. Blocks of scales that do not end where the ranges do are dissolved: rows get scales of
    their own, columns make the weight a plain one. axis: -1 columns, -2 rows, -3 experts."""
    shape = list(spec.shape)
    whole, shape[axis] = shape[axis], sum(map(len, ranges))
    scheme = spec.scheme
    if scheme is not None and axis == -2 and _off(ranges, scheme.group_rows, whole):
        scheme = replace(scheme, group_rows=1)
    if scheme is not None and axis == -1:
        scheme = _columns_of(scheme, whole, ranges)
    return WeightSpec(tuple(shape), spec.dtype, scheme)


def _columns_of(scheme: QuantScheme, whole: int, ranges: Sequence[range]) -> QuantScheme | None:
    if scheme.group == whole:
        return replace(scheme, group=sum(map(len, ranges)))
    block = scheme.group * max(scheme.super_group, 1)
    rounded = scheme.rounding.group if scheme.rounding is not None else 0
    if any(_off(ranges, size, whole) for size in (block, rounded or 1)):
        return None
    return scheme


def _off(ranges: Sequence[range], block: int, whole: int) -> bool:
    return any(part.start % block or (part.stop % block and part.stop != whole) for part in ranges)


def cut_weight(weight: Weight, spec: WeightSpec, axis: int, ranges: Sequence[range]) -> Weight:
    """The rows, columns or experts of `ranges`, in order, as `spec` (of `cut_spec`) announces them."""
    if isinstance(weight, torch.Tensor):
        return _cut(weight, axis, ranges, weight.shape[axis])
    if spec.scheme is None:
        return _cut(weight.dequantize(spec.dtype), axis, ranges, weight.shape[axis])
    if spec.scheme.group_rows == 1:
        weight = weight.with_row_scales()
    parts: dict[str, Any] = {}
    for field in fields(QuantTensor):
        part = getattr(weight, field.name)
        if isinstance(part, torch.Tensor) and field.name != "codebook":
            parts[field.name] = _cut(part, axis, ranges, weight.shape[axis])
    return replace(weight, scheme=spec.scheme, shape=spec.shape, **parts)


def _cut(part: torch.Tensor, axis: int, ranges: Sequence[range], whole: int) -> torch.Tensor:
    """Slices of a tensor whose `axis` stands for `whole` rows or columns: packed numbers, or scales of several."""
    size = part.shape[axis]
    if size == 1 < whole:
        return part  # one scale for all columns
    found = []
    for wanted in ranges:
        first, last = wanted.start * size // whole, -(-wanted.stop * size // whole)
        found.append(part.narrow(axis, first, last - first))
    return (found[0] if len(found) == 1 else torch.cat(found, axis)).contiguous()
