"""Programs of the processor: a tape per loaded model, and the step function itself where there can be none."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

from hardpoint_cpu.native.abi import Batch
from hardpoint_cpu.native.attention_plan import NativePlan
from hardpoint_cpu.native.provider import NativeProvider
from hardpoint_cpu.native.recording import PlanSlot, Recording, Unreadable, Unrecordable
from hardpoint_cpu.native.sizes import FIRST, SECOND, StepSize, compare
from hardpoint_cpu.native.stage import Stage
from hardpoint_cpu.native.tape import Tape
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.program import Bucket, Program, ProgramBuilder, StepFunction, StepInputs, StepOutputs, Weights
from hardpoint_platforms.state_cache import State

log = logging.getLogger(__name__)


class TapeBuilder(ProgramBuilder):
    """Any size runs, so there are no buckets; the largest step says how much memory a tape gets."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._largest = StepSize(256, 16)

    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        self._largest = StepSize(max_tokens, max_requests)
        return ()

    def holds(self, provider: OpProvider) -> bool:
        return isinstance(provider, NativeProvider)

    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        return TapeProgram(self._stage, step, self._largest)


class TapeProgram(Program):
    """Plays a step from its tape. The tape belongs to the weights and the state that it was recorded with."""

    def __init__(self, stage: Stage, step: StepFunction, largest: StepSize) -> None:
        self._stage = stage
        self._step = step
        self._largest = largest
        self._key: tuple[Weights, State] | None = None
        self._tape: Tape | None = None
        self._why_not = ""

    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        with torch.inference_mode():
            tape = self._tape_for(inputs, state, weights)
            if tape is None or inputs.hidden_index is not None:
                return self._step(inputs, state, weights)
            return self._play(tape, inputs), state

    def describe(self) -> str:
        if self._tape is None:
            return f"called op by op: {self._why_not}" if self._why_not else "called op by op"
        said = f"a tape of {self._tape.native_calls} native calls"
        splits = self._tape.splits
        if not splits:
            return f"{said}, played by one call"
        ops = ", ".join(f"{count} x {name}" for name, count in splits.most_common())
        return f"{said}, split by {splits.total()} torch ops: {ops}"

    def _play(self, tape: Tape, inputs: StepInputs) -> StepOutputs:
        size = StepSize(inputs.token_ids.shape[0], inputs.logits_index.shape[0])
        if size.tokens > tape.capacity.tokens or size.draws > tape.capacity.draws:
            tape.reserve(StepSize(max(size.tokens, tape.capacity.tokens), max(size.draws, tape.capacity.draws)))
        plan = inputs.plans[tape.plans[0]] if tape.plans else None
        batch = plan.batch if plan is not None else Batch(tokens=size.tokens)
        batch.draws = size.draws
        given = (inputs.token_ids, inputs.positions, inputs.logits_index)
        drawn = tape.play(size, given, ctypes.addressof(batch), inputs.sampling)
        if drawn is None or drawn.finite is None:
            raise Unrecordable("the tape ended without a draw")
        return StepOutputs(drawn, drawn.finite)

    def _tape_for(self, inputs: StepInputs, state: State, weights: Weights) -> Tape | None:
        if self._key is None or self._key[0] is not weights or self._key[1] is not state:
            self._tape = None  # before the new one takes memory
            self._tape, self._why_not = record(self._stage, self._step, inputs, state, weights, self._largest)
            self._key = (weights, state)
            if self._tape is None:
                log.warning("steps run op by op, not from a tape: %s", self._why_not)
        return self._tape


def record(
    stage: Stage, step: StepFunction, inputs: StepInputs, state: State, weights: Weights, largest: StepSize
) -> tuple[Tape | None, str]:
    """A tape of `step`, or None and the reason."""
    if stage.recording is not None:
        return None, "another recording is under way"
    if inputs.carried:
        return None, "the layers before are on another device"
    try:
        first = _run(stage, step, inputs, state, weights, FIRST)
        second = _run(stage, step, inputs, state, weights, SECOND)
        sized = compare(first, second)
        tape = Tape(stage, sized, (weights, state, tuple(first.constants)), largest)
        if len(tape.plans) > 1:
            raise Unrecordable("native ops read several plans")
        return tape, ""
    except Exception as error:
        # Whatever stands in the way, the step function itself still runs; a fault in it shows there.
        return None, str(error).partition("\n")[0] or type(error).__name__


def _run(
    stage: Stage, step: StepFunction, inputs: StepInputs, state: State, weights: Weights, size: StepSize
) -> Recording:
    """Run the step function once without computing."""
    recording = Recording(stage)
    tokens, positions, index = (
        recording.input((count,), torch.int64) for count in (size.tokens, size.tokens, size.draws)
    )
    plans = tuple(
        PlanSlot(place) if isinstance(plan, NativePlan) else Unreadable("plans")
        for place, plan in enumerate(inputs.plans)
    )
    sampling: Any = Unreadable("sampling parameters")
    fake = StepInputs(tokens, positions, plans, index, sampling)
    run: Callable[..., tuple[StepOutputs, State]] = step
    stage.recording = recording
    try:
        with torch.inference_mode(False), torch.no_grad(), recording:
            outputs, after = run(fake, state, weights)
    finally:
        stage.recording = None
    if outputs.carried:
        raise Unrecordable("the layers behind are on another device")
    drawn = recording.drawn
    if drawn is None or outputs.sample is not drawn or outputs.finite is not drawn.finite:
        raise Unrecordable("its results are not those of one native draw")
    if after is not state:
        raise Unrecordable("it returns another state")
    return recording
