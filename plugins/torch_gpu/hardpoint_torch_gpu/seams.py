"""Where a recorded step is cut: ops that read a plan are called between two graphs, on tensors of fixed address.

Attention of a mixed batch launches as many programs as the batch has tiles and parts, so that no graph can hold it. All
else of a step depends on its padded sizes alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

#: What numpy calls a number of so many bytes; which kind it is does not matter to a view of the same memory.
_SAME_SIZE = {1: ("|u1", torch.uint8), 2: ("<i2", torch.int16), 4: ("<i4", torch.int32), 8: ("<i8", torch.int64)}


class Seam(ABC):
    """Takes the place of a plan while a step is recorded in pieces. A kernel that knows it gives it what to do with the
    plan of each run; to any other it is nothing that could be read."""

    @abstractmethod
    def cut(self, call: Callable[[Any], None]) -> None:
        """End this piece; call(plan) is made before the next one at every run."""


def unowned(x: torch.Tensor) -> torch.Tensor:
    """x without a hold on its memory: that of a graph's pool may serve the pieces that follow. On the host x itself.

    A call that is kept for later runs must hold no other tensors of the step: a model's layers would not share memory.
    """
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype) if x.is_cuda else x


class _Memory:
    """The memory of a tensor, as arrays of GPUs tell each other of it."""

    def __init__(self, x: torch.Tensor) -> None:
        size = x.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "typestr": _SAME_SIZE[size][0],
            "data": (x.data_ptr(), False),
            "version": 3,
        }
