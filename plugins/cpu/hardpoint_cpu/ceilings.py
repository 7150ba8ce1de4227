"""Ceilings of this machine as torch reaches them, where there is no kernel library."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from hardpoint_platforms.ceilings import Ceilings

_ROUNDS = 5


def torch_ceilings(dtypes: Sequence[torch.dtype], memory: int = 256 << 20, size: int = 1024) -> Ceilings:
    """The best of a few rounds: the sum of `memory` bytes of float32, and the product of two [size, size] matrices.

    dtypes: those that are multiplied. Takes about half a second on two cores.
    """
    with torch.inference_mode():
        numbers = torch.ones(memory // 4)
        reads = numbers.nbytes / _best(numbers.sum)
        rates = {}
        for dtype in dtypes:
            matrix = torch.ones(size, size, dtype=dtype)
            rates[str(dtype).removeprefix("torch.")] = size**3 / _best(functools.partial(torch.mm, matrix, matrix))
    return Ceilings(reads, rates)


def _best(run: Callable[[], torch.Tensor]) -> float:
    """Seconds of the fastest round, after one that does not count."""
    run()
    taken = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return min(taken)
