"""A plan of bucket-static shape: every request of a batch becomes a row of equally many places.

    decode (each request at most one token)   R rows of 1 place
    anything else                             R rows of T places, because one request may bring all tokens

Which of the two follows from the padded sizes, and for as many tokens as requests from the kind of step, so that all
steps of a bucket get plans of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.provider import AttentionPlanner


@dataclass(frozen=True, eq=False)
class StaticPlan:
    """Tensors of T tokens and R requests; n is 1 or T.

    Attributes:
        page_tokens: tokens per page.
        pages, offsets: per cache group int64 [T], where each new token is stored; padding goes to page 0.
        tables: per cache group int64 [R, P].
        rows: int64 [R, n], place in the batch of each request's new tokens.
        valid: bool [R, n], False for places that hold no token of the request.
        positions: int64 [R, n], of each token in its sequence; places without one repeat the last that is real.
        places: int64 [T], where each token of the batch lies in the flattened rows; 0 for padding.
        fresh: bool [R], whether nothing was computed of the request before this step.
    """

    page_tokens: int
    pages: tuple[torch.Tensor, ...]
    offsets: tuple[torch.Tensor, ...]
    tables: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    valid: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    fresh: torch.Tensor

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x[T, ...] -> [R, n, ...], 0 where a place holds no token."""
        rows = x.index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape)
        return torch.where(self.valid[(..., *(None,) * (x.dim() - 1))], rows, 0)

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """rows[R, n, ...] -> [T, ...]; padding gets something of the first row."""
        return rows.flatten(0, 1).index_select(0, self.places)


class StaticPlanner(AttentionPlanner):
    """Plans on the host, outside the program, and puts the plan on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, batch: AttentionBatch) -> StaticPlan:
        tokens, requests = len(batch.slot_mapping[0]), len(batch.sequence_lengths)
        width = 1 if tokens == requests and batch.decode_only else tokens
        starts = batch.query_start.astype(np.int64)
        counts, lengths = np.diff(starts), batch.sequence_lengths.astype(np.int64)
        computed = lengths - counts
        within = np.arange(width)[None]
        owner = np.repeat(np.arange(requests), counts)
        places = np.zeros(tokens, np.int64)
        places[: len(owner)] = owner * width + np.arange(len(owner)) - starts[owner]
        slots = [mapping.astype(np.int64) for mapping in batch.slot_mapping]
        return StaticPlan(
            page_tokens=batch.page_tokens,
            pages=tuple(self._put(slot // batch.page_tokens) for slot in slots),
            offsets=tuple(self._put(slot % batch.page_tokens) for slot in slots),
            tables=tuple(self._put(table.astype(np.int64)) for table in batch.page_tables),
            rows=self._put(np.minimum(starts[:-1, None] + within, max(0, tokens - 1))),
            valid=self._put(within < counts[:, None]),
            positions=self._put(np.clip(computed[:, None] + within, 0, np.maximum(lengths - 1, 0)[:, None])),
            places=self._put(places),
            fresh=self._put(computed == 0),
        )

    def _put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
