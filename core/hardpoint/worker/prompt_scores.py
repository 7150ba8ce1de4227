"""Log-probabilities of prompt tokens: hidden states of the step, turned into logits a few rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.models.base import CausalModel
from hardpoint.scheduler.plan import RowLogprobs, StepPlan
from hardpoint.worker.sequence_table import SequenceTable
from hardpoint_platforms.batch import Logprobs
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.contract import Kernel
from hardpoint_platforms.program import TOP_LOGPROBS, Weights
from hardpoint_platforms.streams import Readback

#: Rows of logits at once: 64 rows of a vocabulary of 262,144 are 64 MiB.
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class PromptScores:
    """Scores of `count` prompt tokens on their way to the host, a piece at a time, `wanted` top ones of each."""

    wanted: int
    count: int
    parts: tuple[Readback, ...]

    def wait(self) -> RowLogprobs:
        """On the host."""
        found = zip(*(part.wait() for part in self.parts), strict=True)
        whole = [np.concatenate([tensor.numpy() for tensor in one])[: self.count] for one in found]
        return row_logprobs(whole, self.wanted)


class PromptScorer:
    """Scores prompts. A chunk [a, b) of a prompt of length P scores positions a + 1 .. min(b, P - 1)."""

    def __init__(
        self, device: Device, model: CausalModel, score: Kernel, weights: Weights, table: SequenceTable
    ) -> None:
        self._device = device
        self._hidden_size = model.hidden_size
        self._weights = weights
        self._table = table

        def score_rows(
            hidden: torch.Tensor, at: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, weights: Weights, k: int
        ) -> tuple[torch.Tensor, ...]:
            """hidden [T, H], at [N] of it, places int64 [2, N] of the token table: what follows there."""
            targets = tokens[places[0], places[1]].long()
            return parts_of(targets, score(model.logits(hidden.index_select(0, at), weights), targets, k))

        self._score_rows = device.routine(score_rows)

    def has_work(self, plan: StepPlan) -> bool:
        """Whether the plan computes prompt tokens that are to be scored."""
        return bool(self._chunks(plan))

    def hidden_index(
        self, plan: StepPlan, query_start: npt.NDArray[np.int32], size: int | None = None
    ) -> npt.NDArray[np.int64] | None:
        """Tokens of the batch whose hidden states are needed, or None; with a `size` always so many, token 0 added."""
        parts = [
            np.arange(query_start[place], query_start[place] + count, dtype=np.int64)
            for place, _, count in self._chunks(plan)
        ]
        if size is None:
            return np.concatenate(parts) if parts else None
        index = np.zeros(size, np.int64)
        if parts:
            index[: sum(map(len, parts))] = np.concatenate(parts)
        return index

    def launch(self, plan: StepPlan, hidden: torch.Tensor | None) -> dict[int, PromptScores]:
        """Scores by place in the plan, on their way to the host; `hidden` belongs to the tokens that `hidden_index`
        named."""
        if hidden is None:
            return {}
        found: dict[int, PromptScores] = {}
        start = 0
        for place, first, count in self._chunks(plan):
            row = int(plan.rows[place])
            wanted = int(self._table.prompt_logprobs[row])
            targets = np.arange(first + 1, first + 1 + count, dtype=np.int64)
            places = np.stack((np.full(count, row, np.int64), targets))
            parts = []
            for low in range(0, count, _ROWS_AT_ONCE):
                some = slice(low, min(low + _ROWS_AT_ONCE, count))
                parts.append(self._launch_rows(hidden, np.arange(start, start + count)[some], places[:, some], wanted))
            found[place] = PromptScores(wanted, count, tuple(parts))
            start += count
        return found

    def _launch_rows(
        self, hidden: torch.Tensor, at: npt.NDArray[np.int64], places: npt.NDArray[np.int64], wanted: int
    ) -> Readback:
        """Scores of at most `_ROWS_AT_ONCE` rows; where shapes are fixed always of as many, with the most asked for."""
        if self._table.static:
            missing = _ROWS_AT_ONCE - len(at)
            at, places, wanted = np.pad(at, (0, missing)), np.pad(places, ((0, 0), (0, missing))), TOP_LOGPROBS
        there, where = self._device.upload([torch.from_numpy(at), torch.from_numpy(np.ascontiguousarray(places))])
        scores = self._score_rows(hidden, there, self._table.tokens, where, self._weights, wanted)
        return self._device.read_back(scores)

    def rehearse(self, tokens: int, dtype: torch.dtype) -> None:
        """Score hidden states [tokens, H] that mean nothing: what compiles does so now."""
        hidden = self._device.zeros((tokens, self._hidden_size), dtype)
        self._launch_rows(hidden, np.zeros(1, np.int64), np.zeros((2, 1), np.int64), 0).wait()

    def collect(self, scores: dict[int, PromptScores]) -> dict[int, RowLogprobs]:
        """The same on the host."""
        return {place: found.wait() for place, found in scores.items()}

    def _chunks(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """(place in the plan, first position, positions) of each chunk with something to score."""
        wanted = self._table.prompt_logprobs[plan.rows] >= 0
        if not wanted.any():
            return []
        last = np.minimum(plan.computed + plan.query_lengths, self._table.prompt_lengths[plan.rows] - 1)
        counts = np.where(wanted, last - plan.computed, 0)
        return [(i, int(plan.computed[i]), int(counts[i])) for i in np.flatnonzero(counts > 0).tolist()]


def parts_of(token_ids: torch.Tensor, scores: Logprobs) -> tuple[torch.Tensor, ...]:
    """What `row_logprobs` joins on the host: int64 [N], float32 [N], int64 [N, k], float32 [N, k], int64 [N]."""
    return token_ids, scores.chosen, scores.top_ids, scores.top, scores.rank


def row_logprobs(parts: Sequence[npt.NDArray[Any]], wanted: int) -> RowLogprobs:
    """`parts_of` on the host, the chosen tokens in front of the `wanted` top ones: [N, 1 + wanted]."""
    token_ids, chosen, top_ids, top, ranks = parts
    ids = np.concatenate((token_ids[:, None], top_ids[:, :wanted]), -1)
    return RowLogprobs(ids, np.concatenate((chosen[:, None], top[:, :wanted]), -1), ranks)
