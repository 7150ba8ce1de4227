"""A step's batch as the kernels read it: the host arrays themselves, behind an hp_batch. No index work at all."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from hardpoint_cpu.native.abi import Batch, Group, address
from hardpoint_platforms.batch import AttentionBatch, Int32s
from hardpoint_platforms.ops.provider import AttentionPlanner


class NativePlan:
    """Keeps the arrays that its hp_batch points into. `draws` may be set before each run."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._arrays: list[npt.NDArray[np.int32]] = []
        self.tokens = int(batch.slot_mapping[0].shape[0]) if batch.slot_mapping else batch.num_tokens
        self._groups = (Group * max(1, len(batch.page_tables)))()
        for place, (table, slots) in enumerate(zip(batch.page_tables, batch.slot_mapping, strict=True)):
            self._groups[place] = Group(self._keep(table), table.shape[1], self._keep(slots))
        self.batch = Batch(
            self.tokens,
            0,
            batch.num_requests,
            batch.page_tokens,
            self._keep(batch.query_start),
            self._keep(batch.sequence_lengths),
            ctypes.addressof(self._groups),
            len(batch.page_tables),
        )
        self.address = ctypes.addressof(self.batch)

    def _keep(self, array: Int32s) -> int:
        kept = np.ascontiguousarray(array, np.int32)
        self._arrays.append(kept)
        return address(kept)


class NativePlanner(AttentionPlanner):
    """Makes `NativePlan`s; one object for all kernels of a device that read a plan."""

    def plan(self, batch: AttentionBatch) -> NativePlan:
        return NativePlan(batch)
