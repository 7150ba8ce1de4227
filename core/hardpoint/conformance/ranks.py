"""Group `ranks`: tiny models cut over the ranks of a device that runs several in one process (`Platform.open_mesh`).

Where a platform runs one rank per process it refuses; the group `collectives` is for these.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hardpoint.conformance import tiny
from hardpoint_platforms.communication import TENSOR_AXIS, Mesh
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Refused, Wrong
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.errors import DeviceUnavailable

#: (family, ranks, whether each has whole experts); with 4 ranks two of them share a key and value head.
_CASES = (("llama", 2, False), ("llama", 4, False), ("qwen3_moe", 2, False), ("qwen3_moe", 4, True))


def checks(subject: Subject) -> Iterator[Check]:
    """Each family at 2 or 4 ranks."""
    dtype = str(subject.device.capabilities().compute_dtypes[0]).removeprefix("torch.")
    for family, count, whole_experts in _CASES:
        title = f"tokens of a crowd, {count} ranks{', whole experts' if whole_experts else ''}"
        body = partial(_cut, family, count, whole_experts)
        yield Check("ranks", family, title, 5, body, dtype=dtype, patience=300.0)


def _cut(family: str, count: int, whole_experts: bool, subject: Subject, seed: int) -> Measure:
    mesh = Mesh((TENSOR_AXIS,), (count,))
    try:
        device = subject.platform.open_mesh(subject.index, mesh, subject.options)
    except DeviceUnavailable as error:
        raise Refused(error.message) from error
    try:
        if device.mesh != mesh:
            raise Wrong(f"a device opened for {mesh} says that it runs {device.mesh}")
        return tiny.compare(device, family, seed, whole_experts)
    finally:
        device.close()


GROUP = Group("ranks", "models cut over ranks", checks)
