"""Steps whose decodes share pages: told from others by their plans, and turned into such without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hardpoint_platforms.program import StepInputs
from hardpoint_torch_gpu.plan import GpuPlan


def shares(inputs: StepInputs) -> bool:
    """Whether rows share pages to an extent that is worth it."""
    return any(isinstance(plan, GpuPlan) and plan.sharing for plan in inputs.plans)


def saved(inputs: StepInputs) -> int:
    """Cached tokens that a layer need not read."""
    plans = [plan for plan in inputs.plans if isinstance(plan, GpuPlan)]
    return max((one.saved for plan in plans for one in plan.sharing if one is not None), default=0)


def alone(inputs: StepInputs) -> StepInputs:
    """The same step, every row by itself."""
    plans = (replace(plan, sharing=()) if isinstance(plan, GpuPlan) else plan for plan in inputs.plans)
    return replace(inputs, plans=tuple(plans))


def rehearsed(inputs: StepInputs) -> Iterator[StepInputs]:
    """Of a decode step, those that launch what steps with shared pages launch, in graphs and beside prompts; none where
    no layer can use shared pages."""
    roomy = [plan.with_room() if isinstance(plan, GpuPlan) and plan.sharers else plan for plan in inputs.plans]
    if shares(given := replace(inputs, plans=tuple(roomy))):
        yield given
        plans = (replace(plan, padded=True) if isinstance(plan, GpuPlan) else plan for plan in roomy)
        yield replace(inputs, plans=tuple(plans))
