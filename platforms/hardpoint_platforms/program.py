"""How a step becomes something to run: called op by op, captured and replayed, or compiled as a whole.

The step is `step(inputs, state, weights) -> (outputs, state)`: ordinary Python over bound ops, with no shape that
depends on data and no read-back to the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hardpoint_platforms.batch import SampleResult, SamplingInputs
from hardpoint_platforms.ops.contract import Packed
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.state_cache import State


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Device tensors of one step, padded to a bucket of T tokens and R requests.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T].
        plans: one per planner of the op table.
        logits_index: int64 [R], the token of each request whose logits are sampled.
        sampling: parameters of the R draws.
        hidden_index: int64 [N], tokens whose hidden states are wanted (prompt log-probabilities), or None.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    plans: tuple[Any, ...]
    logits_index: torch.Tensor
    sampling: SamplingInputs
    hidden_index: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class StepOutputs:
    """Results of one step, still on the device.

    Attributes:
        sample: the draws of the R requests.
        finite: bool [R], False where the logits held a NaN or an infinity; that draw means nothing.
        hidden: [N, hidden_size] for `hidden_index`, or None.
    """

    sample: SampleResult
    finite: torch.Tensor
    hidden: torch.Tensor | None = None


Weights = tuple[Packed, ...]
StepFunction = Callable[[StepInputs, State, Weights], tuple[StepOutputs, State]]


@dataclass(frozen=True)
class Bucket:
    """The static sizes of a program: tokens and requests, padding included. 0 means any size."""

    tokens: int
    requests: int


class Program(ABC):
    """A step made ready for one bucket."""

    @abstractmethod
    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        """Run the step. `state` is dead afterwards; only the returned one is valid."""

    def describe(self) -> str:
        """How it runs, for people ("a tape of 243 native calls"); empty where there is nothing to say."""
        return ""


class ProgramBuilder(ABC):
    """Builds programs and says which buckets it wants."""

    @abstractmethod
    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        """Buckets to build at start, smallest first; empty where any size runs."""

    @abstractmethod
    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        """A program of `step` for `bucket`."""

    def holds(self, provider: OpProvider) -> bool:
        """Whether a program holds calls of this provider's kernels; others split it, called between its parts."""
        return True

    def fingerprint(self) -> str:
        """What a saved program depends on (driver, compiler, chip); part of the cache key."""
        return ""

    def save(self, program: Program, path: Path) -> bool:
        """Keep a built program in `path`; False where there is nothing to keep."""
        return False

    def load(self, path: Path, bucket: Bucket) -> Program | None:
        """A program kept earlier under the same fingerprint, or None."""
        return None


class _EagerProgram(Program):
    def __init__(self, step: StepFunction) -> None:
        self._step = step

    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        with torch.inference_mode():
            return self._step(inputs, state, weights)


class EagerBuilder(ProgramBuilder):
    """The default: the step function itself, for any size."""

    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        return ()

    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        return _EagerProgram(step)
