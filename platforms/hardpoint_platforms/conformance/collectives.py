"""Group `collectives`: every collective at 1, 2 and 4 ranks and on a 2 by 2 mesh, ranks as threads of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from hardpoint_platforms.communication import Communicator, Mesh
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Wrong
from hardpoint_platforms.conformance.comparison import require_close
from hardpoint_platforms.conformance.contracts import short
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.ops.contract import Tolerance
from hardpoint_platforms.ops.samples import Source

MESHES = (Mesh(("tensor",), (1,)), Mesh(("tensor",), (2,)), Mesh(("tensor",), (4,)), Mesh(("data", "tensor"), (2, 2)))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
#: Seconds that ranks wait for each other.
_JOIN = 40.0

#: What one rank does: communicator, its input by rank -> what it got.
Work = Callable[[Communicator, Callable[[int], torch.Tensor], str], Any]


def checks(subject: Subject) -> Iterator[Check]:
    """Level 4."""
    for mesh in MESHES:
        size = "x".join(map(str, mesh.sizes))
        for dtype in DTYPES:
            for name in _WORK:
                title = f"{name} of {size} ranks"
                body = partial(_run, mesh, dtype, name)
                yield Check("collectives", "communicator", title, 4, body, dtype=short(dtype))
        yield Check("collectives", "communicator", f"mesh of {size} ranks", 4, partial(_mesh, mesh))


def _all_reduce(c: Communicator, made: Callable[[int], torch.Tensor], axis: str) -> Any:
    return c.all_reduce(made(c.rank), axis)


def _all_gather(c: Communicator, made: Callable[[int], torch.Tensor], axis: str) -> Any:
    return c.all_gather(made(c.rank), axis, 0), c.all_gather(made(c.rank).T, axis, 1)


def _reduce_scatter(c: Communicator, made: Callable[[int], torch.Tensor], axis: str) -> Any:
    return c.reduce_scatter(made(c.rank), axis, 1)


def _all_to_all(c: Communicator, made: Callable[[int], torch.Tensor], axis: str) -> Any:
    """Parts of unequal length, one of them empty."""
    peers = c.mesh.peers(c.rank, axis)
    return c.all_to_all([made(c.rank)[: (c.rank + place) % 3] for place in range(len(peers))], axis)


def _broadcast(c: Communicator, made: Callable[[int], torch.Tensor], axis: str) -> Any:
    return c.broadcast(made(c.rank), axis, c.mesh.size(axis) - 1)


def _send(c: Communicator, made: Callable[[int], torch.Tensor], axis: str) -> Any:
    """Round a ring of all ranks: even ones send first."""
    world = len(_ranks(c.mesh))
    if world == 1:
        return made(0)
    after, before = (c.rank + 1) % world, (c.rank - 1) % world
    like = torch.empty_like(made(before))
    if c.rank % 2 == 0:
        c.send(made(c.rank), after)
        return c.receive(like, before)
    got = c.receive(like, before)
    c.send(made(c.rank), after)
    return got


_WORK: dict[str, Work] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send and receive": _send,
}


def _expected(mesh: Mesh, rank: int, name: str, made: Callable[[int], torch.Tensor], axis: str) -> Any:
    """The same, told by the interface's words over all ranks' inputs."""
    peers = mesh.peers(rank, axis)
    mine = peers.index(rank)
    if name == "all_reduce":
        return torch.stack([made(peer) for peer in peers]).sum(0).to(made(rank).dtype)
    if name == "all_gather":
        return torch.cat([made(peer) for peer in peers], 0), torch.cat([made(peer).T for peer in peers], 1)
    if name == "reduce_scatter":
        total = torch.stack([made(peer) for peer in peers]).sum(0).to(made(rank).dtype)
        return total.chunk(len(peers), 1)[mine]
    if name == "all_to_all":
        return tuple(made(peer)[: (peer + mine) % 3] for peer in peers)
    if name == "broadcast":
        return made(peers[-1])
    return made((rank - 1) % len(_ranks(mesh)))


def _run(mesh: Mesh, dtype: torch.dtype, name: str, subject: Subject, seed: int) -> Measure:
    def made(rank: int) -> torch.Tensor:
        source = Source(seed % 10000 + rank)
        if dtype is torch.int64:
            return source.integers(-(1 << 40), 1 << 40, 3, 8)
        return source.normal(3, 8, dtype=dtype)

    device = subject.device
    tolerance = Tolerance(0.0, 0.0) if dtype is torch.int64 else Tolerance(1e-6, 1e-2 if dtype.itemsize == 2 else 1e-5)

    kinds: list[object] = []

    def work(c: Communicator) -> list[Any]:
        kinds.append(getattr(type(c), name.partition(" ")[0]))
        held = {rank: device.to_device(made(rank)) for rank in _ranks(mesh)}
        return [device_to_host(device, _WORK[name](c, lambda rank: held[rank], axis)) for axis in mesh.axes]

    for rank, results in enumerate(_everywhere(subject, mesh, work)):
        for axis, found in zip(mesh.axes, results, strict=True):
            wanted = _expected(mesh, rank, name, made, axis)
            require_close(found, wanted, tolerance, kinds[0], f"{name} over {axis!r} at rank {rank}")
    return Measure()


def device_to_host(device: Any, value: Any) -> Any:
    """Tensors of a result on the host."""
    if isinstance(value, tuple):
        return tuple(device.to_host(part) for part in value)
    return device.to_host(value)


def _mesh(mesh: Mesh, subject: Subject, seed: int) -> Measure:
    def work(c: Communicator) -> Any:
        c.barrier()
        return c.mesh, c.rank

    for rank, found in enumerate(_everywhere(subject, mesh, work)):
        if found != (mesh, rank):
            raise Wrong(f"rank {rank} says that it is rank {found[1]} of {found[0]}")
    return Measure()


def _everywhere(subject: Subject, mesh: Mesh, work: Callable[[Communicator], Any]) -> list[Any]:
    """work(communicator) at every rank, each on a thread; results in rank order. Raises the first rank's error."""
    world, address = len(_ranks(mesh)), _address()
    results: list[Any] = [None] * world
    errors: dict[int, BaseException] = {}

    def one(rank: int) -> None:
        try:
            communicator = subject.device.communicator(mesh, rank, address)
            results[rank] = work(communicator)
            communicator.barrier()
            communicator.close()
        except BaseException as error:  # told by the thread that waits
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_JOIN)
    if errors:
        raise errors[min(errors)]
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        raise Wrong(f"ranks {stuck} of {world} do not come back within {_JOIN:g} s")
    return results


def _ranks(mesh: Mesh) -> range:
    world = 1
    for size in mesh.sizes:
        world *= size
    return range(world)


def _address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


GROUP = Group("collectives", "collectives", checks)
