"""Steps that run before serving and never again, so that kernels are there for steps that are called op by op.

Recorded sizes bring all that depends on tokens and requests, as each runs once before serving. What is left:

    more tokens     than the largest recorded step has: other tiles where a weight serves only some tokens (experts)
    other draws     with penalties, biases, masks or log-probabilities, or without filters
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hardpoint_platforms.batch import SamplingInputs
from hardpoint_platforms.program import Bucket, Program, SamplingShape, StepFunction, StepInputs, StepOutputs, Weights
from hardpoint_platforms.state_cache import State
from hardpoint_torch_gpu.compile_ahead import CompileAhead

log = logging.getLogger(__name__)

#: Tokens of such steps, beside the fewest that are not recorded: from one tile to the next larger one they double, and
#: from the last on no tile is larger.
TOKENS = (1024, 2048, 4096)
#: Tokens and requests of the one with other draws.
_FEW = 8


@dataclass(frozen=True)
class RehearsalBucket(Bucket):
    """A size to run once. No step is padded to it."""

    def fits(self, tokens: int, requests: int, query: int, sampling: SamplingShape) -> bool:
        """Never."""
        return False


def rehearsals(max_tokens: int, max_requests: int, recorded: int) -> Iterator[RehearsalBucket]:
    """Sizes within the limits of a step, smallest first. recorded: tokens of the largest step that is recorded."""
    few = min(_FEW, max_tokens, max_requests)
    yield RehearsalBucket(few, few, 0, SamplingShape.FULL)
    for tokens in sorted({min(size, max_tokens) for size in (recorded + 1, *TOKENS)}):
        if tokens > recorded:
            yield RehearsalBucket(tokens, min(tokens, max_requests), 0, SamplingShape.GREEDY)


class Rehearsal(Program):
    """A step that is called op by op, before serving."""

    def __init__(self, step: StepFunction, bucket: Bucket, ahead: CompileAhead) -> None:
        """ahead: compiles what the step launches before it runs."""
        self._step, self._bucket, self._ahead = step, bucket, ahead

    def begin(self, inputs: StepInputs, state: State, weights: Weights) -> None:
        with torch.inference_mode():
            for number, each in enumerate(_ways(inputs)):
                self._ahead.begin((self._bucket, number), lambda each=each: self._step(each, state, weights))  # type: ignore[misc]

    def prepare(self, inputs: StepInputs, state: State, weights: Weights) -> State:
        """Run it. Where memory is too small the start goes on: a step may never have so many tokens."""
        self._ahead.finish()
        try:
            for each in _ways(inputs):
                with self._ahead.listening():
                    _, state = self.run(each, state, weights)
        except torch.OutOfMemoryError as error:
            told = str(error).partition("\n")[0]
            log.warning("a step of %d tokens could not run before serving: %s", self._bucket.tokens, told)
        return state

    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        with torch.inference_mode():
            return self._step(inputs, state, weights)


def _ways(inputs: StepInputs) -> Iterator[StepInputs]:
    """The step with each set of draws that has launches of its own."""
    for sampling in draws(inputs.sampling):
        yield replace(inputs, sampling=sampling)


def draws(full: SamplingInputs) -> Iterator[SamplingInputs]:
    """Of inputs with every part: those parts that decide what is launched; of others nothing but themselves.

    Kernels with filters launch the same whichever parts are left out, but for the mask; without filters they also sum
    up weights, in the pass that applies the mask or in one of its own.
    """
    yield full
    if full.allowed is not None:
        yield replace(full, allowed=None, num_logprobs=0)
        plain = replace(full, penalties=None, bias=None, num_logprobs=None, filters=False)
        yield plain
        yield replace(plain, allowed=None)
