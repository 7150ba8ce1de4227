"""Collectives over torch.distributed's process groups, and the default of every device: gloo, through host memory.

The process groups belong to the communicator: torch.distributed's default group is neither needed nor touched, so that
several meshes can live in one process. Over gloo copies travel as bytes, whatever the dtype; sums of 16-bit floats are
done in float32, so that they do not depend on the ring.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from hardpoint_platforms.communication import Communicator, Mesh
from hardpoint_platforms.errors import PlatformError, UnsupportedOperation

#: Seconds that ranks wait for each other before a collective is an error.
TIMEOUT_SECONDS = 600.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class GroupCommunicator(Communicator):
    """One rank of a mesh: a process group per axis, and one of all. Every rank must make the same calls in one order.

    What a backend adds: how it makes a group, and its collectives.
    """

    def __init__(self, mesh: Mesh, rank: int, rendezvous: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Join at `rendezvous` ("tcp://host:port"), where rank 0 listens.

        Raises ValueError for a malformed rendezvous or a rank outside the mesh, PlatformError if the others do not
        come.
        """
        if not dist.is_available():
            raise UnsupportedOperation("this build of torch has no torch.distributed; one rank works without it")
        host, port = _address(rendezvous)
        world = mesh.ranks
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside a mesh of {world} ranks")
        self._mesh, self._rank = mesh, rank
        self._groups: dict[str, Any] = {}
        self._store: Any = None
        self._world: Any = None
        self._timeout = timedelta(seconds=timeout_seconds)
        if world == 1:
            return
        self._local = host in _LOOPBACK
        with self._failing(f"cannot meet {world} ranks at {rendezvous}"):
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, world, is_master=rank == 0, timeout=self._timeout
            )
            self._world = self._join("world", tuple(range(world)))
            for axis in mesh.axes:
                peers = mesh.peers(rank, axis)
                if len(peers) > 1:
                    self._groups[axis] = self._join(f"{axis}/{peers[0]}", peers)

    def _join(self, name: str, peers: tuple[int, ...]) -> Any:
        store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]
        return self._make(store, peers.index(self._rank), len(peers))

    @abstractmethod
    def _make(self, store: Any, place: int, size: int) -> Any:
        """The backend's process group of `size` ranks, of which this is number `place`."""

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def rank(self) -> int:
        return self._rank

    def barrier(self) -> None:
        if self._groups:
            with self._failing("barrier"):
                self._world.barrier().wait()

    def close(self) -> None:
        """Let go of the groups; a second call does nothing. Collectives raise PlatformError afterwards."""
        self._groups = dict.fromkeys(self._groups)
        self._world = self._store = None

    def _group(self, axis: str) -> Any:
        """The axis's group, None for an axis of one rank."""
        group = self._groups.get(axis)
        if group is None and axis in self._groups:
            raise PlatformError(f"rank {self._rank}: the communicator is closed")
        return group

    def _everybody(self, peer: int) -> Any:
        if not self._groups or peer == self._rank:
            raise ValueError(f"rank {self._rank} has no peer {peer} to talk to")
        self._group(next(iter(self._groups)))
        return self._world

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PlatformError(
                f"rank {self._rank}: {what} failed: {error}",
                hint="another rank ended, hangs or cannot be reached: look at its log first",
            ) from error

    def _check_root(self, root: int, axis: str) -> None:
        if not 0 <= root < self._mesh.size(axis):
            raise ValueError(f"there is no peer {root} along {axis!r}")

    def _shares(self, x: torch.Tensor, axis: str, dim: int) -> int:
        """Ranks along `axis`. Raises ValueError where dimension `dim` has no equal share for each."""
        count = self._mesh.size(axis)
        if x.shape[dim] % count:
            raise ValueError(f"{x.shape[dim]} along dimension {dim} cannot be cut into {count} equal shares")
        return count

    def _parts(self, parts: Sequence[torch.Tensor], axis: str) -> Any:
        """The axis's group. Raises ValueError unless there is a part for each of its ranks."""
        if len(parts) != self._mesh.size(axis):
            raise ValueError(f"{len(parts)} parts for {self._mesh.size(axis)} ranks along {axis!r}")
        return self._group(axis)


class GlooCommunicator(GroupCommunicator):
    """Over gloo, through host memory: for tensors of any device."""

    def _make(self, store: Any, place: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        if self._local:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        else:
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        return dist.ProcessGroupGloo(store, place, size, options)

    def all_reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        group = self._group(axis)
        if group is None or x.numel() == 0:
            return x
        wide = torch.float32 if x.dtype.is_floating_point and x.dtype.itemsize < 4 else x.dtype
        total = x.detach().to("cpu", wide, copy=True).contiguous()
        with self._failing(f"all_reduce over {axis!r}"):
            group.allreduce([total]).wait()
        return total.to(x.device, x.dtype)

    def all_gather(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        group = self._group(axis)
        if group is None or x.numel() == 0:
            return x if group is None else torch.cat([x] * self._mesh.size(axis), dim)
        mine = _bytes(x)
        everybody = [torch.empty_like(mine) for _ in range(self._mesh.size(axis))]
        with self._failing(f"all_gather over {axis!r}"):
            group.allgather([everybody], [mine]).wait()
        return torch.cat([_from_bytes(part, x.shape, x) for part in everybody], dim)

    def reduce_scatter(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        count = self._shares(x, axis, dim)
        place = self._mesh.peers(self._rank, axis).index(self._rank)
        return self.all_reduce(x, axis).chunk(count, dim)[place].clone()

    def all_to_all(self, parts: Sequence[torch.Tensor], axis: str) -> tuple[torch.Tensor, ...]:
        group = self._parts(parts, axis)
        if group is None:
            return tuple(parts)
        like, row_shape = parts[0], parts[0].shape[1:]
        row_bytes = like.element_size() * row_shape.numel()
        sent = torch.tensor([part.shape[0] for part in parts])
        received = torch.empty_like(sent)
        outgoing = torch.cat([_bytes(part) for part in parts])
        with self._failing(f"all_to_all over {axis!r}"):
            group.alltoall_base(received, sent, [], [], dist.AllToAllOptions()).wait()
            sizes = [rows * row_bytes for rows in received.tolist()]
            incoming = torch.empty(sum(sizes), dtype=torch.uint8)
            leaving = [rows * row_bytes for rows in sent.tolist()]
            group.alltoall_base(incoming, outgoing, sizes, leaving, dist.AllToAllOptions()).wait()
        pieces = incoming.split(sizes)
        rows = received.tolist()
        return tuple(_from_bytes(piece, (n, *row_shape), like) for piece, n in zip(pieces, rows, strict=True))

    def broadcast(self, x: torch.Tensor, axis: str, root: int = 0) -> torch.Tensor:
        self._check_root(root, axis)
        group = self._group(axis)
        if group is None or x.numel() == 0:
            return x
        data = _bytes(x)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        with self._failing(f"broadcast over {axis!r}"):
            group.broadcast([data], options).wait()
        return _from_bytes(data, x.shape, x)

    def send(self, x: torch.Tensor, to_rank: int) -> None:
        world = self._everybody(to_rank)
        if x.numel():
            with self._failing(f"send to rank {to_rank}"):
                world.send([_bytes(x)], to_rank, 0).wait()

    def receive(self, like: torch.Tensor, from_rank: int) -> torch.Tensor:
        world = self._everybody(from_rank)
        if like.numel() == 0:
            return torch.empty_like(like)
        data = torch.empty(like.numel() * like.element_size(), dtype=torch.uint8)
        with self._failing(f"receive from rank {from_rank}"):
            world.recv([data], from_rank, 0).wait()
        return _from_bytes(data, like.shape, like)


def _address(rendezvous: str) -> tuple[str, int]:
    parts = urlsplit(rendezvous)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"{rendezvous!r} is not of the form tcp://host:port")
    return parts.hostname, parts.port


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A host copy of x as uint8 [n]."""
    return x.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(data: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """A tensor of `like`'s dtype and device out of uint8 [n]."""
    return data.clone().view(like.dtype).reshape(tuple(shape)).to(like.device)
