"""Log-probabilities of prompt tokens: hidden states of the step, turned into logits a few rows at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.models.base import CausalModel
from hardpoint.scheduler.plan import RowLogprobs, StepPlan
from hardpoint.worker.sequence_table import SequenceTable
from hardpoint_platforms.batch import Logprobs
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.contract import Kernel
from hardpoint_platforms.program import Weights
from hardpoint_platforms.streams import Readback

#: Rows of logits at once: 64 rows of a vocabulary of 262,144 are 64 MiB.
_ROWS_AT_ONCE = 64


class PromptScorer:
    """Scores prompts. A chunk [a, b) of a prompt of length P scores positions a + 1 .. min(b, P - 1)."""

    def __init__(
        self, device: Device, model: CausalModel, score: Kernel, weights: Weights, table: SequenceTable
    ) -> None:
        self._device = device
        self._model = model
        self._score = score
        self._weights = weights
        self._table = table

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

    def launch(self, plan: StepPlan, hidden: torch.Tensor | None) -> dict[int, Readback]:
        """Scores by place in the plan, on their way to the host; `hidden` belongs to the tokens that `hidden_index`
        named."""
        if hidden is None:
            return {}
        found: dict[int, Readback] = {}
        start = 0
        for place, first, count in self._chunks(plan):
            row = int(plan.rows[place])
            targets = self._table.tokens[row, first + 1 : first + 1 + count].long()
            wanted = int(self._table.prompt_logprobs[row])
            scores = self._score_rows(hidden[start : start + count], targets, wanted)
            found[place] = self._device.read_back((scores.top_ids, scores.top, scores.rank))
            start += count
        return found

    def collect(self, scores: dict[int, Readback]) -> dict[int, RowLogprobs]:
        """The same on the host."""
        return {place: RowLogprobs(*(tensor.numpy() for tensor in found.wait())) for place, found in scores.items()}

    def _chunks(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """(place in the plan, first position, positions) of each chunk with something to score."""
        wanted = self._table.prompt_logprobs[plan.rows] >= 0
        if not wanted.any():
            return []
        last = np.minimum(plan.computed + plan.query_lengths, self._table.prompt_lengths[plan.rows] - 1)
        counts = np.where(wanted, last - plan.computed, 0)
        return [(i, int(plan.computed[i]), int(counts[i])) for i in np.flatnonzero(counts > 0).tolist()]

    def _score_rows(self, hidden: torch.Tensor, targets: torch.Tensor, wanted: int) -> Logprobs:
        parts: list[Logprobs] = []
        for start in range(0, len(targets), _ROWS_AT_ONCE):
            chunk = targets[start : start + _ROWS_AT_ONCE]
            logits = self._model.logits(hidden[start : start + _ROWS_AT_ONCE], self._weights)
            scores: Logprobs = self._score(logits, chunk, wanted)
            parts.append(with_chosen_first(scores, chunk))
        return Logprobs(
            chosen=torch.cat([part.chosen for part in parts]),
            rank=torch.cat([part.rank for part in parts]),
            top_ids=torch.cat([part.top_ids for part in parts]),
            top=torch.cat([part.top for part in parts]),
        )


def with_chosen_first(scores: Logprobs, token_ids: torch.Tensor) -> Logprobs:
    """Put the chosen token and its log-probability in front of the top ones: [N, 1 + k]."""
    return Logprobs(
        chosen=scores.chosen,
        rank=scores.rank,
        top_ids=torch.cat((token_ids[:, None], scores.top_ids), -1),
        top=torch.cat((scores.chosen[:, None], scores.top), -1),
    )
