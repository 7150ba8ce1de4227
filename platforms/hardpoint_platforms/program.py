"""How a step becomes something to run: called op by op, captured and replayed, or compiled as a whole.

The step is `step(inputs, state, weights) -> (outputs, state)`: ordinary Python over bound ops, with no shape that
depends on data and no read-back to the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
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
        sampling: parameters of the R draws. R is 0 where the layers that follow are on another device.
        hidden_index: int64 [N], tokens whose hidden states are wanted (prompt log-probabilities), or None.
        carried: [T, ...] each, what the layers before handed on, where these are on another device.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    plans: tuple[Any, ...]
    logits_index: torch.Tensor
    sampling: SamplingInputs
    hidden_index: torch.Tensor | None = None
    carried: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class StepOutputs:
    """Results of one step, still on the device.

    Attributes:
        sample: the draws of the R requests.
        finite: bool [R], False where the logits held a NaN or an infinity; that draw means nothing.
        hidden: [N, hidden_size] for `hidden_index`, or None.
        carried: [T, ...] each, what goes to the layers that follow, where these are on another device.
    """

    sample: SampleResult
    finite: torch.Tensor
    hidden: torch.Tensor | None = None
    carried: tuple[torch.Tensor, ...] = ()


Weights = tuple[Packed, ...]
StepFunction = Callable[[StepInputs, State, Weights], tuple[StepOutputs, State]]


class SamplingShape(IntEnum):
    """Which of its optional parts a step's `SamplingInputs` has. Each shape serves whatever a lower one does.

    With R requests, T tokens, a vocabulary of V and sequences of at most L tokens, the inputs of a program are:

        ANY      whatever the rows of this step need; sizes and parts change from step to step
        GREEDY   all_greedy, no filters, no optional part, no log-probabilities, no hidden_index
        DRAW     filters, not all_greedy, no optional part, no log-probabilities, no hidden_index
        FULL     DRAW and penalties (history [R, L]), bias ([R * BIAS_ENTRIES], unused ones add 0 to token 0 of row 0),
                 allowed ([R, ceil(V / 32)]), num_logprobs = TOP_LOGPROBS, hidden_index [T]
    """

    ANY = 0
    GREEDY = 1
    DRAW = 2
    FULL = 3


#: Bias entries per request and top log-probabilities of a FULL step.
BIAS_ENTRIES = 1024
TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Bucket:
    """The static sizes of a program, padding included.

    Attributes:
        tokens, requests: 0 means any number.
        query: most tokens that one request may bring: 1 for a program that only decodes, 0 for any number.
        sampling: shape of the sampling inputs.
    """

    tokens: int
    requests: int
    query: int = 0
    sampling: SamplingShape = SamplingShape.ANY

    def fits(self, tokens: int, requests: int, query: int, sampling: SamplingShape) -> bool:
        """Whether a step of these sizes may be padded to it. `query`: tokens of the request that brings most.

        Asked before each step, smallest first. Where programs become ready one after another a device may derive, and
        say no for those that are not; one that is ready has to be left for every step that the batch limits allow.
        """
        return (
            (not self.tokens or tokens <= self.tokens)
            and (not self.requests or requests <= self.requests)
            and (not self.query or query <= self.query)
            and (self.sampling is SamplingShape.ANY or sampling <= self.sampling)
        )


#: What a device that runs steps of any size has.
ANY_SIZE = Bucket(0, 0)


@dataclass(frozen=True)
class Footprint:
    """What a compiled program takes on each device, as its compiler says.

    Attributes:
        arguments: bytes of weights, state and inputs.
        in_place: of these, what it returns in the same memory: the state.
        temporaries: bytes beside them while it runs.
        collectives: how many of each kind it has ("all-reduce": 65).
        kernels: calls of kernels that the compiler did not make.
        seconds: that compiling took.
    """

    arguments: int
    in_place: int
    temporaries: int
    collectives: Mapping[str, int]
    kernels: int
    seconds: float


class Program(ABC):
    """A step made ready for one bucket."""

    @abstractmethod
    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        """Run the step. `state` is dead afterwards; only the returned one is valid."""

    def begin(self, inputs: StepInputs, state: State, weights: Weights) -> None:
        """Start, and do not wait for, what `prepare` will need: compiling, in other threads.

        Called with the inputs of `prepare` for every program before the first of them is prepared. The state stays
        valid; what is written to it lies in page 0. The default does nothing.
        """
        return

    def prepare(self, inputs: StepInputs, state: State, weights: Weights) -> State:
        """Make it ready to serve: capture or compile what takes long. Called once, before the first `run`.

        `inputs` have the shapes of every later step of this bucket and hold one token that is stored in page 0. Returns
        the new state; `state` is dead afterwards. The default runs the step once.
        """
        return self.run(inputs, state, weights)[1]

    def footprint(self, inputs: StepInputs, state: State, weights: Weights) -> Footprint | None:
        """Compile it for inputs of these shapes, run nothing, and say what it takes; None where nobody can say."""
        return None

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

    def seal(self) -> None:
        """Every program is prepared and serving starts: building one from here on is a fault of the core."""
        return

    def catch_up(self) -> bool:
        """Do a piece of what was put off when serving began, in some tens of milliseconds; whether any is left.

        Called while no request is served, on the thread that runs steps. What is never called upon may be done beside
        steps, or not at all.
        """
        return False

    def holds(self, provider: OpProvider) -> bool:
        """Whether a program holds calls of this provider's kernels.

        Others are called outside it: between its parts where it can be split, else the step runs op by op.
        """
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
