"""Inputs at fixed addresses, which graphs read."""

from __future__ import annotations

import torch

from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.program import StepInputs, Weights
from hardpoint_platforms.state_cache import State
from hardpoint_torch_gpu.leaves import leaves, mapped


class StaticInputs:
    """Copies of a step's inputs, overwritten by those of each run."""

    def __init__(self, inputs: StepInputs, state: State, weights: Weights) -> None:
        self.inputs: StepInputs = mapped(inputs, torch.clone)
        self._state, self._weights = state, weights
        self._by_dtype: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
        for place, tensor in enumerate(leaves(self.inputs)):
            places, targets = self._by_dtype.setdefault(tensor.dtype, ([], []))
            places.append(place)
            targets.append(tensor)

    def take(self, inputs: StepInputs, state: State, weights: Weights) -> None:
        """Copy the inputs of a run. Raises UnsupportedOperation for another state or other weights."""
        if state is not self._state or weights is not self._weights:
            raise UnsupportedOperation("a graph runs with the state and the weights that it was recorded with")
        fresh = leaves(inputs)
        for places, targets in self._by_dtype.values():
            torch._foreach_copy_(targets, [fresh[place] for place in places], non_blocking=True)
