"""Group `collectives`: every collective at 1, 2 and 4 ranks and on a 2 by 2 mesh.

Each rank is a process with a device of its own, as far as there are devices (`ranks`). A platform that no other process
can load by name, as in unit tests, has its ranks on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from hardpoint_platforms.communication import Communicator, Mesh
from hardpoint_platforms.conformance import blame
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Wrong
from hardpoint_platforms.conformance.comparison import require_close
from hardpoint_platforms.conformance.contracts import short
from hardpoint_platforms.conformance.ranks import JOIN, Ranks, Task, free_address
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.contract import Tolerance
from hardpoint_platforms.ops.samples import Source

MESHES = (Mesh(("tensor",), (1,)), Mesh(("tensor",), (2,)), Mesh(("tensor",), (4,)), Mesh(("data", "tensor"), (2, 2)))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
#: Seconds that a check may take: the first one starts the processes.
_PATIENCE = 150.0
#: The task that asks a communicator who it is.
_WHO = "mesh"

#: What one rank does: communicator, its input by rank -> what it got.
Work = Callable[[Communicator, Callable[[int], torch.Tensor], str], Any]


def checks(subject: Subject) -> Iterator[Check]:
    """Level 4."""
    ranks = Ranks(subject) if subject.installed else None
    for mesh in MESHES:
        size = "x".join(map(str, mesh.sizes))
        for dtype in DTYPES:
            for name in _WORK:
                yield _check(f"{name} of {size} ranks", mesh, short(dtype), name, ranks)
        yield _check(f"mesh of {size} ranks", mesh, "", _WHO, ranks)


def _check(title: str, mesh: Mesh, dtype: str, name: str, ranks: Ranks | None) -> Check:
    body = partial(_run, mesh, dtype, name, ranks)
    return Check("collectives", "communicator", title, 4, body, dtype=dtype, patience=_PATIENCE)


def _run(mesh: Mesh, dtype: str, name: str, ranks: Ranks | None, subject: Subject, seed: int) -> Measure:
    task = Task(mesh.axes, mesh.sizes, dtype, name, seed)
    if ranks is None:
        _on_threads(subject.device, task)
    else:
        ranks.run(task)
    return Measure()


def perform(device: Device, c: Communicator, task: Task) -> None:
    """One rank's part of a task, and a look at what it got. Raises Wrong."""
    mesh = task.mesh
    if task.name == _WHO:
        c.barrier()
        if (c.mesh, c.rank) not in [(mesh, rank) for rank in range(mesh.ranks)]:
            raise Wrong(f"a rank says that it is rank {c.rank} of {c.mesh}")
        return
    dtype = getattr(torch, task.dtype)
    tolerance = Tolerance(0.0, 0.0) if dtype is torch.int64 else Tolerance(1e-6, 1e-2 if dtype.itemsize == 2 else 1e-5)

    def made(rank: int) -> torch.Tensor:
        source = Source(task.seed % 10000 + rank)
        if dtype is torch.int64:
            return source.integers(-(1 << 40), 1 << 40, 3, 8)
        return source.normal(3, 8, dtype=dtype)

    held = {rank: device.to_device(made(rank)) for rank in range(mesh.ranks)}
    code = getattr(type(c), task.name.partition(" ")[0])
    for axis in mesh.axes:
        found = device_to_host(device, _WORK[task.name](c, lambda rank: held[rank], axis))
        wanted = _expected(mesh, c.rank, task.name, made, axis)
        require_close(found, wanted, tolerance, code, f"{task.name} over {axis!r} at rank {c.rank}")


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
    world = c.mesh.ranks
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
    return made((rank - 1) % mesh.ranks)


def device_to_host(device: Device, value: Any) -> Any:
    """Tensors of a result on the host."""
    if isinstance(value, tuple):
        return tuple(device.to_host(part) for part in value)
    return device.to_host(value)


def _on_threads(device: Device, task: Task) -> None:
    """The task at every rank, each on a thread. Raises the first rank's error."""
    address = free_address()
    errors: dict[int, BaseException] = {}

    def one(rank: int) -> None:
        try:
            communicator = device.communicator(task.mesh, rank, address)
            if communicator.rank != rank:
                raise Wrong(f"rank {rank} says that it is rank {communicator.rank}")
            perform(device, communicator, task)
            communicator.barrier()
            communicator.close()
        except BaseException as error:  # told by the thread that waits
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(task.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN)
    if errors:
        raise errors[min(errors)]
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        place = blame.of_thread(threads[stuck[0]], ())
        raise Wrong(f"ranks {stuck} of {task.world} do not come back within {JOIN:g} s", place=place)


GROUP = Group("collectives", "collectives", checks)
