"""Collectives among the ranks of a mesh. Needed only for more than one rank; the default runs over gloo on the host."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: The axis along which the layers of a model are cut.
TENSOR_AXIS = "tensor"


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid with named axes: Mesh(("data", "tensor"), (2, 4)) holds 8 ranks, the last axis fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many there are; 1 without axes."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along `axis`; 1 for an axis the mesh does not have."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, in order, itself included."""
        if axis not in self.axes:
            return (rank,)
        place = self.axes.index(axis)
        stride = 1
        for size in self.sizes[place + 1 :]:
            stride *= size
        first = rank - rank // stride % self.sizes[place] * stride
        return tuple(first + i * stride for i in range(self.sizes[place]))


class Communicator(ABC):
    """Collectives of one rank, by axis name. Each returns a new tensor or its input, never a view to write into."""

    @property
    @abstractmethod
    def mesh(self) -> Mesh:
        """The grid of ranks."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number in the mesh. Where one program runs all ranks (`Device.mesh`), nobody can tell."""

    def index(self, axis: str) -> torch.Tensor:
        """This rank's place along `axis`: int64 of no dimension, on the device; it may be used inside a step.

        The default makes it of `rank` on the host.
        """
        return torch.tensor(self.mesh.peers(self.rank, axis).index(self.rank))

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """Sum over the ranks of `axis`."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        """Concatenate along `dim`, in rank order."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        """Sum, then keep this rank's equal share along `dim`."""

    @abstractmethod
    def all_to_all(self, parts: Sequence[torch.Tensor], axis: str) -> tuple[torch.Tensor, ...]:
        """Send parts[i] to the i-th peer; return what each peer sent. First dimensions may differ."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, axis: str, root: int = 0) -> torch.Tensor:
        """The tensor of the `root`-th peer."""

    @abstractmethod
    def send(self, x: torch.Tensor, to_rank: int) -> None:
        """Send to a rank of the mesh."""

    @abstractmethod
    def receive(self, like: torch.Tensor, from_rank: int) -> torch.Tensor:
        """Receive a tensor of `like`'s shape and dtype."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for every rank of the mesh."""

    @abstractmethod
    def close(self) -> None:
        """Leave the mesh."""
