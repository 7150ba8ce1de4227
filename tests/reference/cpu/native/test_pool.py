"""The thread pool: order between ops, sleep, several callers, more threads than processors, an early end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from hardpoint_cpu.native.abi import Code, RowsOf, pack_op
from hardpoint_cpu.native.library import NativeLibrary, Pool
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.errors import DeviceUnavailable, UnsupportedOperation

pytestmark = pytest.mark.reference

ROWS, WIDTH = 24, 40


class Reversals:
    """A list of ops, each of which reverses the rows: every thread reads what others wrote in the op before."""

    def __init__(self, stage: Stage, count: int, seed: int = 1) -> None:
        self.stage, self.count = stage, count
        generator = torch.Generator().manual_seed(seed)
        self.start = torch.randn(ROWS, WIDTH, generator=generator)
        self.buffers = (self.start.clone(), torch.empty(ROWS, WIDTH))
        self.index = torch.arange(ROWS - 1, -1, -1)
        self.ops = b"".join(
            pack_op(
                Code.GATHER,
                RowsOf.FIXED,
                ROWS,
                [self.index.data_ptr(), self.buffers[k % 2].data_ptr(), self.buffers[1 - k % 2].data_ptr()],
                (WIDTH, WIDTH, WIDTH),
            )
            for k in range(count)
        )

    def run(self) -> None:
        """Play the list and check what comes out."""
        self.buffers[0].copy_(self.start)
        self.stage.run(self.ops, self.count, 0)
        found = self.buffers[self.count % 2]
        assert torch.equal(found, self.start if self.count % 2 == 0 else self.start.flip(0))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_an_op_sees_all_of_the_op_before(threads: int, stages: Callable[[int], Stage]) -> None:
    for count in (1, 2, 301):
        Reversals(stages(threads), count).run()


def test_work_handed_out_is_taken_once_in_every_op(stages: Callable[[int], Stage]) -> None:
    stage, total = stages(3), torch.zeros(ROWS, WIDTH)
    ones = torch.ones(ROWS, WIDTH)
    op = pack_op(Code.ADD, RowsOf.FIXED, ROWS, [total.data_ptr(), ones.data_ptr(), total.data_ptr()], (WIDTH,))
    stage.run(op * 200, 200, 0)
    assert total.eq(200).all()


@pytest.mark.parametrize("pause", [0.0, 0.0004, 0.02])
def test_threads_that_went_to_sleep_come_back(pause: float, stages: Callable[[int], Stage]) -> None:
    work = Reversals(stages(3), 7)
    for _ in range(10):
        time.sleep(pause)
        work.run()


def test_callers_wait_for_each_other(stages: Callable[[int], Stage]) -> None:
    failures: list[BaseException] = []

    def call(seed: int) -> None:
        try:
            work = Reversals(stages(2), 51, seed)
            for _ in range(20):
                work.run()
        except BaseException as error:
            failures.append(error)

    stages(2)
    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def test_a_pool_may_end_at_any_time(library: NativeLibrary) -> None:
    for threads in (1, 2, 4):
        for pause in (0.0, 0.005):
            pool = Pool(library, threads)
            work = Reversals(Stage(library, pool), 3)
            work.run()
            time.sleep(pause)
            pool.close()
            pool.close()
            with pytest.raises(DeviceUnavailable):
                work.run()
            Pool(library, threads).close()  # one that never worked


def test_pinned_threads_work_too(library: NativeLibrary) -> None:
    import os

    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    for chosen in ([cpus[0], cpus[-1]], [cpus[0], 100000]):  # a processor that is not there is left out of account
        pool = Pool(library, 2, chosen)
        Reversals(Stage(library, pool), 11).run()
        pool.close()
    if before is not None:
        assert os.sched_getaffinity(0) == before, "the caller's own thread is left alone"


def test_an_op_without_a_kernel_is_named_and_nothing_runs(stages: Callable[[int], Stage]) -> None:
    stage, total = stages(2), torch.zeros(1, 4)
    known = pack_op(Code.ADD, RowsOf.FIXED, 1, [total.data_ptr(), torch.ones(1, 4).data_ptr(), total.data_ptr()], (4,))
    for code in (0, -1, 63, 64, 1 << 20):
        with pytest.raises(UnsupportedOperation, match="op 1 of 2"):
            stage.run(known + pack_op(code, 0, 0, ()), 2, 0)
    assert total.eq(0).all()
    stage.run(b"", 0, 0)


def test_no_rows_are_no_work(stages: Callable[[int], Stage]) -> None:
    for code in (Code.GATHER, Code.NORM, Code.ADD_NORM, Code.ROPE, Code.ACTIVATE, Code.GATED, Code.ADD, Code.COPY):
        stages(2).call(code, 0, (), (WIDTH, 0))


def test_the_profile_counts_what_ran(library: NativeLibrary, stages: Callable[[int], Stage]) -> None:
    library.profile()
    Reversals(stages(2), 31).run()
    spent = library.profile()
    assert set(spent) == {"gather"}
    assert spent["gather"] > 0
    assert library.profile() == {}
