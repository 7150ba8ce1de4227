"""An executor that computes nothing: for benches of the scheduler, and tests of what is around it."""

from __future__ import annotations

import numpy as np

from hardpoint.executor.base import Executor, StepHandle
from hardpoint.scheduler.plan import StepPlan, StepResult


class FinishedStep(StepHandle):
    """A step whose result was there at once."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result

    def done(self) -> bool:
        return True


class NullExecutor(Executor):
    """Draws token (row + position) mod vocab_size for every row that samples. Brings no log-probabilities."""

    def __init__(self, vocab_size: int = 32000) -> None:
        self._vocab_size = vocab_size

    def submit(self, plan: StepPlan) -> StepHandle:
        position = (plan.rows + plan.computed + plan.query_lengths).astype(np.int64)
        tokens = np.where(plan.samples, position % self._vocab_size, -1)
        return FinishedStep(StepResult(step=plan.step, tokens=tokens))

    def close(self) -> None:
        """Nothing to give back."""
