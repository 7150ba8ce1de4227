"""Group `ranks`: a device that runs several ranks in one process (`Platform.open_mesh`): its collectives inside a
program, and tiny models cut over the ranks.

Where a platform runs one rank per process it refuses; the group `collectives` is for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from hardpoint.conformance import tiny
from hardpoint_platforms.communication import TENSOR_AXIS, Communicator, Mesh
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Refused, Wrong
from hardpoint_platforms.conformance.comparison import require_close
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.device import Device
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.ops.contract import Tolerance
from hardpoint_platforms.ops.samples import Source

#: (family, ranks, whether each has whole experts); with 4 ranks two of them share a key and value head.
_CASES = (("llama", 2, False), ("llama", 4, False), ("qwen3_moe", 2, False), ("qwen3_moe", 4, True))
#: What each rank does with its tensor [4, 8], inside a program.
_INSIDE: dict[str, Callable[[Communicator, torch.Tensor], torch.Tensor]] = {
    "all_gather": lambda c, x: c.all_gather(x, TENSOR_AXIS, 1),
    "all_reduce": lambda c, x: c.all_reduce(x, TENSOR_AXIS),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x, TENSOR_AXIS, 0),
    "all_to_all": lambda c, x: torch.cat(c.all_to_all(x.chunk(c.mesh.ranks, 0), TENSOR_AXIS)),
    "broadcast": lambda c, x: c.broadcast(x, TENSOR_AXIS, c.mesh.ranks - 1),
    "index": lambda c, x: x[:1] * 0 + c.index(TENSOR_AXIS).to(x.dtype),
}


def checks(subject: Subject) -> Iterator[Check]:
    """Collectives and models at 2 and 4 ranks."""
    for count in (2, 4):
        for name in _INSIDE:
            title = f"{name} inside a program of {count} ranks"
            yield Check("ranks", "communicator", title, 4, partial(_collective, name, count), dtype="float32")
    dtype = str(subject.device.capabilities().compute_dtypes[0]).removeprefix("torch.")
    for family, count, whole_experts in _CASES:
        title = f"tokens of a crowd, {count} ranks{', whole experts' if whole_experts else ''}"
        body = partial(_cut, family, count, whole_experts)
        yield Check("ranks", family, title, 5, body, dtype=dtype, patience=300.0)


@contextmanager
def _opened(subject: Subject, count: int) -> Iterator[Device]:
    """As many devices as one. Raises Refused where the platform does not do that, Wrong where it says otherwise."""
    mesh = Mesh((TENSOR_AXIS,), (count,))
    try:
        device = subject.platform.open_mesh(subject.index, mesh, subject.options)
    except DeviceUnavailable as error:
        raise Refused(error.message) from error
    try:
        if device.mesh != mesh:
            raise Wrong(f"a device opened for {mesh} says that it runs {device.mesh}")
        yield device
    finally:
        device.close()


def _collective(name: str, count: int, subject: Subject, seed: int) -> Measure:
    """Every rank's result, gathered so that each has all, beside what the interface's words say."""
    with _opened(subject, count) as device:
        own = [Source(seed % 10000 + rank).normal(4, 8) for rank in range(count)]
        loads = [lambda chip, rank=rank: ((chip.to_device(own[rank]),),) for rank in range(count)]
        ((held,),) = device.load_ranks(loads)
        communicator = device.communicator(device.mesh, 0, "")

        def everybodys(x: torch.Tensor) -> torch.Tensor:
            found = _INSIDE[name](communicator, x)
            return communicator.all_gather(found.unsqueeze(0), TENSOR_AXIS, 0)

        found = device.to_host(device.routine(everybodys)(held))
        code = getattr(type(communicator), name)
        for rank in range(count):
            require_close(
                found[rank], _expected(name, own, rank), Tolerance(1e-6, 1e-5), code, f"{name} at rank {rank}"
            )
    return Measure()


def _expected(name: str, own: list[torch.Tensor], rank: int) -> torch.Tensor:
    count = len(own)
    total = torch.stack(own).sum(0)
    found = {
        "all_gather": lambda: torch.cat(own, 1),
        "all_reduce": lambda: total,
        "reduce_scatter": lambda: total.chunk(count, 0)[rank],
        "all_to_all": lambda: torch.cat([part.chunk(count, 0)[rank] for part in own]),
        "broadcast": lambda: own[-1],
        "index": lambda: torch.full((1, 8), float(rank)),
    }
    return found[name]()


def _cut(family: str, count: int, whole_experts: bool, subject: Subject, seed: int) -> Measure:
    with _opened(subject, count) as device:
        return tiny.compare(device, family, seed, whole_experts)


GROUP = Group("ranks", "several ranks in one process", checks)
