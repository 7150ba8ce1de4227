"""Random weights of the real shapes, for benches: nothing to download, every run the same.

The shapes come from the model itself: whatever it requires is there.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterable

import torch

from hardpoint.errors import WeightsError
from hardpoint.weights.source import WeightSource
from hardpoint_platforms.ops.contract import Weight, WeightSpec

#: Numbers of the run.
_RUN = 4_194_301


class DummySource(WeightSource):
    """A checkpoint that is made up while the model asks for it.

    Matrices are normal with variance 1 / columns, so that activations neither vanish nor overflow; norm weights are
    near 1, biases near 0. A weight depends on `seed` and its name alone: its rows are windows of one long run of random
    numbers, each a little further on, since drawing billions of them takes minutes.
    """

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, empty: bool = False) -> None:
        """`empty`: weights have shapes and no numbers (torch's "meta" device), for `hardpoint plan`."""
        self._empty = empty
        self._seed = seed
        self._dtype = dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._numbers: torch.Tensor | None = None
        self._runs: dict[tuple[float, float], torch.Tensor] = {}
        self._lock = threading.Lock()  # weights are read on several threads

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def require(self, name: str, shape: tuple[int, ...]) -> WeightSpec:
        known = self._shapes.setdefault(name, shape)
        if known != shape:
            raise WeightsError(f"{self.describe(name)}: asked for as {list(known)} and as {list(shape)}")
        return WeightSpec(shape, self._dtype)

    def spec(self, name: str) -> WeightSpec:
        if name not in self._shapes:
            raise WeightsError(f"{self.describe(name)}: no model asked for it, so it has no shape")
        return WeightSpec(self._shapes[name], self._dtype)

    def load(self, name: str) -> Weight:
        """A view into the run wherever it suffices: nothing is copied until somebody wants it laid out."""
        if self._empty:
            return torch.empty(self.spec(name).shape, dtype=self._dtype, device="meta")
        shape = self.spec(name).shape
        columns, rows = shape[-1], math.prod(shape[:-1])
        run = self._run(columns**-0.5 if len(shape) > 1 else 0.02, 1.0 if len(shape) == 1 and "norm" in name else 0.0)
        step = min(columns, (_RUN - columns) // max(rows - 1, 1))
        if step < 1:
            return run.repeat(-(-rows * columns // _RUN))[: rows * columns].view(shape)
        first = zlib.crc32(name.encode()) % (_RUN - (rows - 1) * step - columns + 1)
        strides = [step * math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1)]
        return run.as_strided(shape, (*strides, 1), first)

    def _run(self, scale: float, shift: float) -> torch.Tensor:
        """The run with a scale and a shift; there are few of these."""
        with self._lock:
            if self._numbers is None:
                generator = torch.Generator().manual_seed(self._seed & 0xFFFF_FFFF)
                self._numbers = torch.randn(_RUN, generator=generator, dtype=torch.float32)
            if (scale, shift) not in self._runs:
                self._runs[scale, shift] = (self._numbers * scale + shift).to(self._dtype)
            return self._runs[scale, shift]

    def describe(self, name: str) -> str:
        return f"dummy weights (seed {self._seed}), tensor {name!r}"
