"""The step functions that programs are built from: the model, its logits, and the draw; or a part of the model."""

from __future__ import annotations

import torch

from hardpoint.models.base import CausalModel
from hardpoint_platforms.batch import SampleResult
from hardpoint_platforms.ops.contract import Kernel
from hardpoint_platforms.program import StepFunction, StepInputs, StepOutputs, Weights
from hardpoint_platforms.state_cache import State


def make_step(model: CausalModel, sample: Kernel) -> StepFunction:
    """`step(inputs, state, weights) -> (outputs, state)` for a model, or its last part, and a bound sampling op."""

    def step(inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        (hidden,), state = model.advance(
            inputs.token_ids, inputs.positions, inputs.plans, state, weights, inputs.carried
        )
        logits = model.logits(hidden.index_select(0, inputs.logits_index), weights)
        draw = sample(logits, inputs.sampling)
        finite = draw.finite
        if finite is None:
            # One maximum per row is enough: a NaN wins every maximum, and raw logits have no minus infinities.
            finite = torch.isfinite(logits.amax(-1))
        kept = None if inputs.hidden_index is None else hidden.index_select(0, inputs.hidden_index)
        return StepOutputs(draw, finite, kept), state

    return step


def make_inner_step(model: CausalModel) -> StepFunction:
    """The step of a part of a model that is not the last: nothing is drawn, everything is handed on."""

    def step(inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        carried, state = model.advance(inputs.token_ids, inputs.positions, inputs.plans, state, weights, inputs.carried)
        nothing = SampleResult(inputs.logits_index)
        return StepOutputs(nothing, inputs.logits_index > 0, carried=carried), state

    return step
