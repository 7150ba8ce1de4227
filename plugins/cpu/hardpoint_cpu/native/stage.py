"""Where native kernels hand their ops: run at once, or noted by the recording in progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hardpoint_cpu.native.abi import Code, RowsOf, pack_op
from hardpoint_cpu.native.library import NativeLibrary, Pool
from hardpoint_platforms.errors import DeviceUnavailable, UnsupportedOperation

if TYPE_CHECKING:
    from hardpoint_cpu.native.attention_plan import NativePlan
    from hardpoint_cpu.native.recording import Recording

#: A pointer argument: a tensor, an address, or nothing.
Pointer = torch.Tensor | int | None


class Stage:
    """A library and a pool of one device. Used by one thread at a time.

    `recording` is set while a step is recorded: then nothing is computed, and tensors have no memory.
    """

    def __init__(self, library: NativeLibrary, pool: Pool) -> None:
        self.library = library
        self.pool = pool
        self.recording: Recording | None = None

    def call(
        self,
        code: Code,
        rows: int,
        pointers: Sequence[Pointer],
        integers: Sequence[int] = (),
        floats: Sequence[float] = (),
        plan: NativePlan | None = None,
    ) -> None:
        """One op over `rows` rows; those that read a plan have the batch's tokens as rows."""
        if self.recording is not None:
            self.recording.native(code, rows, pointers, integers, floats, plan)
            return
        addresses = [0 if p is None else p if isinstance(p, int) else p.data_ptr() for p in pointers]
        rows_of = RowsOf.FIXED if plan is None else RowsOf.TOKENS
        self.run(pack_op(code, rows_of, rows, addresses, integers, floats), 1, 0 if plan is None else plan.address)

    def run(self, ops: bytes | int, count: int, batch: int) -> None:
        """Play `count` hp_ops (or those at this address) with the hp_batch at this address (0: none)."""
        pool = self.pool.handle
        if pool is None:
            raise DeviceUnavailable("the device was closed: its threads are gone")
        failed = self.library.c.hp_run(pool, ops, count, batch)
        if failed:
            raise UnsupportedOperation(f"native op {failed - 1} of {count} has no kernel in this library")
