"""Collectives between GPUs by the vendor's library (NCCL, RCCL), which torch calls by the first one's name on both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hardpoint_platforms.communication import Mesh
from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.reference.communication import GroupCommunicator


class GpuCommunicator(GroupCommunicator):
    """One rank, with a GPU of its own. Work goes to the current stream; the host waits where it needs sizes alone."""

    def __init__(self, mesh: Mesh, rank: int, rendezvous: str, device: torch.device, timeout_seconds: float) -> None:
        """As the base; `device`: this rank's GPU, which no other rank has."""
        self._device = device
        with torch.cuda.device(device):
            super().__init__(mesh, rank, rendezvous, timeout_seconds)

    def _make(self, store: Any, place: int, size: int) -> Any:
        self._refuse_shared(store, place, size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        group: Any = dist.ProcessGroupNCCL(store, place, size, options)
        # Now, so that ranks that cannot meet say so here, and not in the first step.
        group.allreduce([torch.zeros(1, device=self._device)]).wait()
        return group

    def _refuse_shared(self, store: Any, place: int, size: int) -> None:
        """Raise UnsupportedOperation where two ranks have the same GPU, on each of them: none waits for another."""
        store.set(f"gpu of {place}", str(torch.cuda.get_device_properties(self._device).uuid))
        gpus = [store.get(f"gpu of {other}") for other in range(size)]
        store.set(f"read by {place}", "")
        if place == 0:  # whose end is the store's
            for other in range(size):
                store.get(f"read by {other}")
        held: dict[bytes, int] = {}
        for rank, gpu in enumerate(gpus):
            first = held.setdefault(gpu, rank)
            if first != rank:
                raise UnsupportedOperation(
                    f"ranks {first} and {rank} share a GPU, the library's collectives want one for each",
                    hint="start no more ranks than there are GPUs",
                )

    def all_reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        group = self._group(axis)
        if group is None or x.numel() == 0:
            return x
        total = x.detach().clone(memory_format=torch.contiguous_format)
        with self._failing(f"all_reduce over {axis!r}"):
            group.allreduce([total]).wait()
        return total

    def all_gather(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        group, count = self._group(axis), self._mesh.size(axis)
        if group is None or x.numel() == 0:
            return x if group is None else torch.cat([x] * count, dim)
        mine = _plain(x)
        everybody = mine.new_empty((count, *mine.shape))
        with self._failing(f"all_gather over {axis!r}"):
            group._allgather_base(everybody, mine).wait()
        return torch.cat([part.view(x.dtype) for part in everybody], dim)

    def reduce_scatter(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        count, group = self._shares(x, axis, dim), self._group(axis)
        if group is None or x.numel() == 0:
            return x if group is None else x.chunk(count, dim)[0].clone()
        shares = torch.stack(x.detach().chunk(count, dim))
        mine = torch.empty_like(shares[0])
        with self._failing(f"reduce_scatter over {axis!r}"):
            group._reduce_scatter_base(mine, shares).wait()
        return mine

    def all_to_all(self, parts: Sequence[torch.Tensor], axis: str) -> tuple[torch.Tensor, ...]:
        group = self._parts(parts, axis)
        if group is None:
            return tuple(parts)
        leaving = [len(part) for part in parts]
        counts = torch.tensor(leaving, device=self._device)
        coming = torch.empty_like(counts)
        outgoing = _plain(torch.cat(list(parts)))
        with self._failing(f"all_to_all over {axis!r}"):
            group.alltoall_base(coming, counts, [], [], dist.AllToAllOptions()).wait()
            sizes = coming.tolist()
            incoming = outgoing.new_empty((sum(sizes), *outgoing.shape[1:]))
            group.alltoall_base(incoming, outgoing, sizes, leaving, dist.AllToAllOptions()).wait()
        return tuple(piece.view(parts[0].dtype) for piece in incoming.split(sizes))

    def broadcast(self, x: torch.Tensor, axis: str, root: int = 0) -> torch.Tensor:
        self._check_root(root, axis)
        group = self._group(axis)
        if group is None or x.numel() == 0:
            return x
        data = _plain(x).clone()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        with self._failing(f"broadcast over {axis!r}"):
            group.broadcast([data], options).wait()
        return data.view(x.dtype)

    def send(self, x: torch.Tensor, to_rank: int) -> None:
        world = self._everybody(to_rank)
        if x.numel():
            with self._failing(f"send to rank {to_rank}"):
                world.send([_plain(x)], to_rank, 0).wait()

    def receive(self, like: torch.Tensor, from_rank: int) -> torch.Tensor:
        world = self._everybody(from_rank)
        data = torch.empty_like(_plain(like))
        if like.numel():
            with self._failing(f"receive from rank {from_rank}"):
                world.recv([data], from_rank, 0).wait()
        return data.view(like.dtype)

    def barrier(self) -> None:
        if self._groups:
            with self._failing("barrier"):
                self._world.allreduce([torch.zeros(1, device=self._device)]).wait()
                torch.cuda.synchronize(self._device)

    def close(self) -> None:
        groups = [group for group in (*self._groups.values(), self._world) if group is not None]
        super().close()
        for group in groups:
            group.shutdown()


def _plain(x: torch.Tensor) -> torch.Tensor:
    """The same bytes, contiguous, in a dtype that the library copies whatever x's is."""
    x = x.detach().contiguous()
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
