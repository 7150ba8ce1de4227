"""Measured ceilings are there, and kernel time is counted where kernels of our own run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint_cpu.ceilings import torch_ceilings
from hardpoint_cpu.native.abi import Code, RowsOf, address, pack_op
from hardpoint_cpu.native.ceiling import measure_ceilings
from hardpoint_cpu.native.library import LibraryUnavailable, Pool, find_library
from hardpoint_cpu.native.stage import Stage
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_platforms.reference.platform import ReferencePlatform

pytestmark = pytest.mark.reference
SMALL = 16 << 16


@pytest.fixture(params=["baseline", None])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """On two threads. Skips without a library that has the kernel."""
    try:
        library = find_library()
    except LibraryUnavailable as error:
        pytest.skip(f"no native kernels: {error}")
    library.use(request.param)
    pool = Pool(library, 2)
    made = Stage(library, pool)
    if not library.has(Code.CEILING):
        pytest.skip("the library is older than its ceiling kernel")
    yield made
    pool.close()
    library.use()


def test_native_ceilings(stage: Stage) -> None:
    found = measure_ceilings(stage, exact=False, memory=SMALL)
    assert found is not None
    assert found.bytes_per_second > 1e6
    assert set(found.multiply_adds_per_second) == {"float32", "int8"}
    assert min(found.multiply_adds_per_second.values()) > 1e6
    exact = measure_ceilings(stage, exact=True, memory=SMALL)
    assert exact is not None
    assert set(exact.multiply_adds_per_second) == {"float32"}


@pytest.mark.parametrize("kind", [0, 1, 2, 3], ids=["fill", "read", "float", "integer"])
def test_threads_say_what_they_did(stage: Stage, kind: int) -> None:
    """Work grows with the passes; fills and reads cover each byte, and stay inside."""
    buffer = np.full(SMALL + 64, 7, np.uint8)

    def done(passes: int) -> Any:
        counts, sums = np.zeros(2), np.zeros(2, np.float32)
        pointers = (address(buffer), address(counts), address(sums))
        stage.run(pack_op(Code.CEILING, RowsOf.FIXED, 1, pointers, (kind, SMALL, passes)), 1, 0)
        return counts

    once = done(1)
    assert (once > 0).all()
    if kind == 0:
        assert once.sum() == SMALL
        assert (buffer[:SMALL] == 1).all()
    if kind == 1:
        assert once.sum() == SMALL
    if kind != 0:
        assert done(3).tolist() == (3 * once).tolist()
    assert (buffer[SMALL:] == 7).all()


def test_torch_ceilings() -> None:
    found = torch_ceilings((torch.float32, torch.bfloat16), memory=1 << 20, size=64)
    assert found.bytes_per_second > 0
    assert set(found.multiply_adds_per_second) == {"float32", "bfloat16"}
    assert min(found.multiply_adds_per_second.values()) > 0


def test_a_device_without_native_kernels_counts_no_kernel_time() -> None:
    device = CpuPlatform().open(0, {"kernels": "torch"})
    assert device.kernel_seconds() is None
    device.close()
    reference = ReferencePlatform().open(0, {})
    assert reference.ceilings() is None
    assert reference.kernel_seconds() is None


def test_kernel_time_is_forgotten_once_read(stage: Stage) -> None:
    stage.library.profile()
    measure_ceilings(stage, exact=True, memory=SMALL)
    spent = stage.library.profile()
    assert set(spent) == {"ceiling"}
    assert spent["ceiling"] > 0
    assert stage.library.profile() == {}
