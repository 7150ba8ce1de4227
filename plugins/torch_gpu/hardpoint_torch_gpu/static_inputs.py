"""Inputs at fixed addresses, which graphs read."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch

from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.program import StepInputs, Weights
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.trees import mapped
from hardpoint_torch_gpu.leaves import leaves
from hardpoint_torch_gpu.plan import GpuPlan


class StaticInputs:
    """A step's inputs, overwritten by those of each run."""

    def __init__(self, inputs: StepInputs, state: State, weights: Weights) -> None:
        """`inputs`: the tensors themselves."""
        self.inputs = inputs
        self._state, self._weights = state, weights
        self._by_dtype: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
        for place, tensor in enumerate(leaves(self.inputs)):
            places, targets = self._by_dtype.setdefault(tensor.dtype, ([], []))
            places.append(place)
            targets.append(tensor)

    @classmethod
    def copied(cls, inputs: StepInputs, state: State, weights: Weights) -> Self:
        """Copies of `inputs`."""
        return cls(mapped(inputs, torch.clone), state, weights)

    def beside(self, inputs: StepInputs) -> StaticInputs:
        """The same, and copies of what rows share in the plans of `inputs`: page tables may be large."""
        plans = tuple(
            replace(mine, sharing=mapped(theirs.sharing, torch.clone)) if isinstance(theirs, GpuPlan) else mine
            for mine, theirs in zip(self.inputs.plans, inputs.plans, strict=True)
        )
        return StaticInputs(replace(self.inputs, plans=plans), self._state, self._weights)

    def take(self, inputs: StepInputs, state: State, weights: Weights) -> None:
        """Copy the inputs of a run. Raises UnsupportedOperation for another state or other weights."""
        if state is not self._state or weights is not self._weights:
            raise UnsupportedOperation("a graph runs with the state and the weights that it was recorded with")
        fresh = leaves(inputs)
        for places, targets in self._by_dtype.values():
            torch._foreach_copy_(targets, [fresh[place] for place in places], non_blocking=True)
