"""The attention plan: the batch as the chip reads it, of the bucket's sizes, whatever is in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from acme_npu.memory import CHIP
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.provider import AttentionPlanner


@dataclass(frozen=True, eq=False)
class AcmePlan:
    """int64 tensors on the chip. Requests without tokens are padding.

    Attributes:
        starts: [R + 1], first token of each request; lengths: [R], tokens it has after this step.
        tables: per cache group [R, P]; slots: per cache group [T].
        page_tokens: tokens per page.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    page_tokens: int


class AcmePlanner(AttentionPlanner):
    """One for all kernels that take a plan."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def plan(self, batch: AttentionBatch) -> AcmePlan:
        slots = [mapping.astype(np.int64) for mapping in batch.slot_mapping]
        if self._fault == "slot_off_by_one":
            slots = [slot + 1 for slot in slots]
        if self._fault == "padding_leaks":
            for slot in slots:
                slot[batch.num_tokens :] += batch.page_tokens
        return AcmePlan(
            _put(batch.query_start),
            _put(batch.sequence_lengths),
            tuple(_put(table) for table in batch.page_tables),
            tuple(_put(slot) for slot in slots),
            batch.page_tokens,
        )


def _put(array: np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]) -> torch.Tensor:
    return CHIP.wrap(torch.from_numpy(array.astype(np.int64)))
