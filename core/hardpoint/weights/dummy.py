"""Random weights of the real shapes, for benches: nothing to download, every run the same.

The shapes come from the model itself: whatever it requires is there.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch

from hardpoint.errors import WeightsError
from hardpoint.weights.source import WeightSource
from hardpoint_platforms.ops.contract import Weight, WeightSpec

#: Numbers of the run: a prime, so that no two rows of a matrix are alike.
_RUN = 4_194_301


class DummySource(WeightSource):
    """A checkpoint that is made up while the model asks for it.

    Matrices are normal with variance 1 / columns, so that activations neither vanish nor overflow; norm weights are
    near 1, biases near 0. A weight depends on `seed` and its name alone: it is cut out of one long run of random
    numbers, since drawing billions of them takes minutes.
    """

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self._seed = seed
        self._dtype = dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._numbers: torch.Tensor | None = None

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
        shape = self.spec(name).shape
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        shift = 1.0 if len(shape) == 1 and "norm" in name else 0.0
        count, first = math.prod(shape), zlib.crc32(name.encode()) % _RUN
        run = self._run()
        run = run[first : first + count] if first + count <= _RUN else run.roll(-first)[:count]
        run = (run * scale + shift).to(self._dtype)
        return run.repeat(-(-count // _RUN))[:count].view(shape)

    def _run(self) -> torch.Tensor:
        if self._numbers is None:
            generator = torch.Generator().manual_seed(self._seed & 0xFFFF_FFFF)
            self._numbers = torch.randn(_RUN, generator=generator, dtype=torch.float32)
        return self._numbers

    def describe(self, name: str) -> str:
        return f"dummy weights (seed {self._seed}), tensor {name!r}"
