"""What the tests of the device `strict` share: a step of one call, and a device to run it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hardpoint_platforms.ops.sampling import sampling_inputs
from hardpoint_platforms.program import Bucket, Program, StepInputs
from hardpoint_platforms.strict.platform import StrictDevice, StrictPlatform

ANY = Bucket(0, 0)
Body = Callable[..., Any]


def opened(memory_mib: int = 256) -> StrictDevice:
    device = StrictPlatform().open(0, {"memory_mib": memory_mib})
    assert isinstance(device, StrictDevice)
    return device


def step_inputs(*given: Any, rows: int = 1) -> StepInputs:
    """Inputs that carry what a test passes in the place of plans."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    return StepInputs(zeros.clone(), zeros.clone(), given, zeros.clone(), sampling_inputs(rows))


def built(device: StrictDevice, body: Body, bucket: Bucket = ANY) -> Program:
    """The program of a step that calls body(*given, *weights) and hands the state on."""

    def step(inputs: StepInputs, state: Any, weights: Any) -> Any:
        return body(*inputs.plans, *weights), state

    return device.programs().build(step, bucket)


def fresh_state(device: StrictDevice) -> Any:
    from hardpoint_platforms.conformance.state import layout_of

    return device.state_cache().allocate(layout_of("keys and values", 8, torch.float32), 4)


def once(body: Body, *given: Any, weights: tuple[Any, ...] = ()) -> Any:
    """Prepare and run a step of one call; its result."""
    device = opened()
    program, inputs = built(device, body), step_inputs(*given)
    state = program.prepare(inputs, fresh_state(device), weights)
    return program.run(inputs, state, weights)[0]
