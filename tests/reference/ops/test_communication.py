"""Collectives over gloo: ranks as processes and as threads, several meshes at once, no default process group."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from hardpoint_platforms.communication import Mesh
from hardpoint_platforms.errors import PlatformError
from hardpoint_platforms.reference.communication import GlooCommunicator

pytestmark = pytest.mark.reference

MESH = Mesh(("data", "tensor"), (2, 2))


def _address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def _ranks(mesh, work):
    """Run work(communicator) once per rank, each in a thread; results in rank order."""
    world, address = 1, _address()
    for size in mesh.sizes:
        world *= size
    results, errors = [None] * world, []

    def one(rank):
        try:
            communicator = GlooCommunicator(mesh, rank, address, timeout_seconds=30)
            results[rank] = work(communicator)
            communicator.barrier()
            communicator.close()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_reductions_go_along_one_axis(dtype):
    def work(c):
        x = torch.full((2, 4), 10.0 ** (c.rank % 2)).to(dtype) * (1 + c.rank // 2)
        y = torch.arange(8).view(2, 4).to(dtype) * (c.rank + 1)
        kept = x.clone()
        total = c.all_reduce(x, "tensor"), c.all_reduce(x, "data"), c.reduce_scatter(y, "tensor", 1)
        assert torch.equal(x, kept)
        return total

    results = _ranks(MESH, work)
    assert [float(r[0][0, 0]) for r in results] == [11, 11, 22, 22]
    assert [float(r[1][0, 0]) for r in results] == [3, 30, 3, 30]
    assert results[0][2].tolist() == [[0, 3], [12, 15]]
    assert results[3][2].tolist() == [[14, 21], [42, 49]]
    assert all(part.dtype == dtype for r in results for part in r)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_copies_carry_any_dtype(dtype):
    def work(c):
        x = torch.tensor([[c.rank % 2, 1], [0, c.rank // 2]]).to(dtype)
        gathered = c.all_gather(x, "tensor", 1), c.all_gather(x, "data", 0)
        return *gathered, c.broadcast(x, "tensor", root=1), c.broadcast(x.T, "data")

    for rank, parts in enumerate(_ranks(MESH, work)):
        across, down, right, above = (part.float().tolist() for part in parts)
        d, t = divmod(rank, 2)
        assert across == [[0, 1, 1, 1], [0, d, 0, d]]
        assert down == [[t, 1], [0, 0], [t, 1], [0, 1]]
        assert right == [[1, 1], [0, d]]
        assert above == [[t, 0], [1, 0]]
        assert all(part.dtype == dtype for part in parts)


def test_all_to_all_of_unequal_parts():
    def work(c):
        place = c.rank % 2
        parts = [torch.full((n, 3), 10.0 * c.rank + i) for i, n in enumerate([(2, 0), (1, 4)][place])]
        return c.all_to_all(parts, "tensor")

    results = _ranks(MESH, work)
    assert [tuple(p.shape) for p in results[0]] == [(2, 3), (1, 3)]
    assert [tuple(p.shape) for p in results[1]] == [(0, 3), (4, 3)]
    assert results[0][1].unique().tolist() == [10.0]
    assert results[3][1].unique().tolist() == [31.0]


def test_send_and_receive_across_the_mesh():
    def work(c):
        like = torch.zeros(2, 2, dtype=torch.bfloat16)
        if c.rank == 0:
            c.send(torch.arange(4).view(2, 2).to(torch.bfloat16).T, 3)
            return c.receive(like, 3)
        if c.rank == 3:
            got = c.receive(like, 0)
            c.send(got * 2, 0)
            return got
        return like

    results = _ranks(MESH, work)
    assert results[3].tolist() == [[0, 2], [1, 3]]
    assert results[0].tolist() == [[0, 4], [2, 6]]


def test_two_meshes_in_one_process_and_no_default_group():
    outer = Mesh(("tensor",), (2,))

    def work(c):
        inner = _ranks(Mesh(("tensor",), (2,)), lambda d: d.all_reduce(torch.ones(1), "tensor")) if c.rank == 0 else []
        c.barrier()
        return float(c.all_reduce(torch.ones(1), "tensor")) + sum(float(x) for x in inner)

    assert _ranks(outer, work) == [6.0, 2.0]
    assert not dist.is_initialized()


def test_one_rank_needs_nobody():
    alone = GlooCommunicator(Mesh(("tensor",), (1,)), 0, "tcp://127.0.0.1:1")
    x = torch.ones(2)
    assert alone.all_reduce(x, "tensor") is x
    assert alone.all_gather(x, "missing axis", 0) is x
    assert torch.equal(alone.reduce_scatter(x, "tensor", 0), x)
    assert alone.all_to_all([x], "tensor") == (x,)
    alone.barrier()
    alone.close()


@pytest.mark.parametrize("address", ["127.0.0.1:80", "tcp://host", "tcp://:80", "udp://a:1"])
def test_bad_rendezvous(address):
    with pytest.raises(ValueError, match="tcp://host:port"):
        GlooCommunicator(MESH, 0, address)


def test_misuse_is_an_error():
    with pytest.raises(ValueError, match="outside a mesh of 4"):
        GlooCommunicator(MESH, 4, "tcp://127.0.0.1:1")
    with pytest.raises(PlatformError, match="rank 1: cannot meet 4 ranks"):
        GlooCommunicator(MESH, 1, _address(), timeout_seconds=0.3)

    def work(c):
        with pytest.raises(ValueError, match="equal shares"):
            c.reduce_scatter(torch.ones(3), "tensor", 0)
        with pytest.raises(ValueError, match="no peer"):
            c.broadcast(torch.ones(3), "tensor", 2)
        with pytest.raises(ValueError, match="1 parts for 2 ranks"):
            c.all_to_all([torch.ones(3)], "tensor")
        c.barrier()
        c.close()
        c.close()
        with pytest.raises(PlatformError, match="closed"):
            c.all_reduce(torch.ones(1), "tensor")
        return True

    address = _address()
    done = []

    def one(rank):
        done.append(work(GlooCommunicator(Mesh(("tensor",), (2,)), rank, address, 30)))

    threads = [threading.Thread(target=one, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [True, True]


PROGRAM = """
import json, sys, torch
from hardpoint_platforms import Mesh
from hardpoint_platforms.reference.communication import GlooCommunicator

torch.set_num_threads(1)
rank = int(sys.argv[1])
communicator = GlooCommunicator(Mesh(("tensor",), (2,)), rank, sys.argv[2], timeout_seconds=60)
x = torch.full((3,), float(rank + 1))
total = communicator.all_reduce(x, "tensor")
rows = communicator.all_to_all([x[: rank + 1], x], "tensor")
communicator.barrier()
communicator.close()
print(json.dumps([total.tolist(), [part.tolist() for part in rows]]))
"""


def test_two_processes():
    address = _address()
    command = [sys.executable, "-c", PROGRAM]
    ranks = [subprocess.Popen([*command, str(rank), address], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert json.loads(printed[0]) == [[3.0] * 3, [[1.0], [2.0, 2.0]]]
    assert json.loads(printed[1]) == [[3.0] * 3, [[1.0] * 3, [2.0] * 3]]


def test_the_death_of_a_peer_is_an_error():
    """A rank that leaves in the middle does not leave the others waiting for ever."""
    address = _address()

    def one(rank, seen):
        communicator = GlooCommunicator(Mesh(("tensor",), (2,)), rank, address, timeout_seconds=3)
        communicator.barrier()
        if rank == 0:
            with pytest.raises(PlatformError, match="all_reduce over 'tensor' failed"):
                communicator.all_reduce(torch.ones(1), "tensor")
            seen.append(True)

    seen: list[bool] = []
    threads = [threading.Thread(target=one, args=(rank, seen)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True]
