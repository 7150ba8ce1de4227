"""Collectives: the chip has no links, so tensors go through the host's communicator and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hardpoint_platforms.communication import Communicator, Mesh

if TYPE_CHECKING:
    from hardpoint_platforms.device import Device


class HostCommunicator(Communicator):
    """Wraps a communicator of host tensors."""

    def __init__(self, device: Device, host: Communicator) -> None:
        self._down, self._up, self._host = device.to_host, device.to_device, host

    @property
    def mesh(self) -> Mesh:
        return self._host.mesh

    @property
    def rank(self) -> int:
        return self._host.rank

    def all_reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return self._up(self._host.all_reduce(self._down(x), axis))

    def all_gather(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        return self._up(self._host.all_gather(self._down(x), axis, dim))

    def reduce_scatter(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        return self._up(self._host.reduce_scatter(self._down(x), axis, dim))

    def all_to_all(self, parts: Sequence[torch.Tensor], axis: str) -> tuple[torch.Tensor, ...]:
        return tuple(self._up(part) for part in self._host.all_to_all([self._down(part) for part in parts], axis))

    def broadcast(self, x: torch.Tensor, axis: str, root: int = 0) -> torch.Tensor:
        return self._up(self._host.broadcast(self._down(x), axis, root))

    def send(self, x: torch.Tensor, to_rank: int) -> None:
        self._host.send(self._down(x), to_rank)

    def receive(self, like: torch.Tensor, from_rank: int) -> torch.Tensor:
        return self._up(self._host.receive(self._down(like), from_rank))

    def barrier(self) -> None:
        self._host.barrier()

    def close(self) -> None:
        self._host.close()
