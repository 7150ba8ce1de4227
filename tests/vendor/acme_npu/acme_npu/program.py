"""Programs: a step is captured once per bucket on fixed buffers and replayed.

Sampling parameters may have any shape, so a program holds one tape per shape of its inputs that it met; steps with
penalties, biases or prompt scores, whose sizes change from step to step, run op by op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from acme_npu.memory import CHIP
from acme_npu.ops.plan import AcmePlan
from acme_npu.ops.provider import AcmeProvider
from acme_npu.tape import Tape
from acme_npu.tree import leaves, mapped, shape_of
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.program import Bucket, Program, ProgramBuilder, StepFunction, StepInputs, StepOutputs, Weights
from hardpoint_platforms.state_cache import State

#: Requests of the widest program; the batch limits keep steps within it.
MAX_REQUESTS = 16
#: Token counts of mixed steps, as far as the engine's largest step needs them.
MIXED = (16, 64, 256, 1024)


class CaptureBuilder(ProgramBuilder):
    """Decode programs of 1, 2, 4 ... requests, mixed ones of 16, 64, 256 ... tokens."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        max_requests = min(max_requests, MAX_REQUESTS)
        decode = [1]
        while decode[-1] < max_requests:
            decode.append(min(2 * decode[-1], max_requests))
        mixed = [size for size in MIXED if size < max_tokens] + [max_tokens]
        small = [Bucket(size, size, query=1) for size in decode]
        return (*small, *(Bucket(size, max_requests) for size in mixed if size >= max_requests or size == max_tokens))

    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        return CapturedProgram(step, self._fault)

    def holds(self, provider: OpProvider) -> bool:
        if isinstance(provider, AcmeProvider):
            return not provider.host
        return provider.planner() is None and provider.op != "experts"


@dataclass(frozen=True, eq=False)
class Capture:
    """A tape, the buffers that it reads, and the outputs that it leaves; `results` are those of the recorded run."""

    tape: Tape
    inputs: StepInputs
    outputs: Any
    results: StepOutputs

    def play(self, inputs: StepInputs, fault: str) -> StepOutputs:
        """Bring the inputs into the buffers and make the calls."""
        tables = {id(table) for plan in self.inputs.plans for table in plan.tables}
        stale = tables if fault == "stale_page_table" else set()
        for buffer, fresh in zip(leaves(self.inputs), leaves(inputs), strict=True):
            if id(buffer) not in stale:
                buffer.copy_(fresh)
        played = self.tape.play(self.outputs)
        if fault == "results_die":
            for kept, fresh in zip(leaves(self.results), leaves(played), strict=True):
                CHIP.launch(torch.Tensor.copy_, kept, CHIP.wrap(fresh))
            return self.results
        # A call may return one of its arguments; results are the caller's, who keeps them.
        outputs: StepOutputs = mapped(played, lambda tensor: CHIP.wrap(tensor.clone()))
        return outputs


class CapturedProgram(Program):
    """Tapes belong to the weights and the state that they were recorded with."""

    def __init__(self, step: StepFunction, fault: str) -> None:
        self._step, self._fault = step, fault
        self._owner: tuple[State, Weights] | None = None
        self._captures: dict[Any, Capture] = {}
        self._why_not = ""

    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        with torch.inference_mode():
            if self._owner is None or self._owner[0] is not state or self._owner[1] is not weights:
                self._owner, self._captures, self._why_not = (state, weights), {}, ""
            if not all(isinstance(plan, AcmePlan) for plan in inputs.plans):
                self._why_not = "an op that is left to the reference reads a plan of other sizes in each step"
            if self._why_not or not _fixed(inputs):
                return self._step(inputs, state, weights)
            shape = shape_of(inputs)
            if shape in self._captures:
                return self._captures[shape].play(inputs, self._fault), state
            return self._capture(shape, inputs, state, weights)

    def describe(self) -> str:
        if self._why_not:
            return f"op by op: {self._why_not}"
        said = max((capture.tape.describe() for capture in self._captures.values()), default="")
        return f"replays {said}" if said else ""

    def _capture(self, shape: Any, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        """Run the step, once, on buffers of its own and keep the calls."""
        buffers: StepInputs = mapped(inputs, torch.clone)
        tape = CHIP.tape = Tape()
        try:
            results, after = self._step(buffers, state, weights)
        finally:
            CHIP.tape = None
        self._why_not = tape.why_not if after is state else "it returns another state"
        if not self._why_not:
            self._captures[shape] = Capture(tape, buffers, tape.finish(results), results)
        return results, after


def _fixed(inputs: StepInputs) -> bool:
    """Whether every later step of these sizes has inputs of these shapes."""
    sampling = inputs.sampling
    return sampling.penalties is None and sampling.bias is None and inputs.hidden_index is None
