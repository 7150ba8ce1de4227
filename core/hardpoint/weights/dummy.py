"""Random weights of the real shapes, for benches: nothing to download, every run the same.

The shapes come from the model itself: whatever it requires is there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from hardpoint.errors import WeightsError
from hardpoint.weights.source import WeightSource
from hardpoint_platforms.ops.contract import Weight, WeightSpec


class DummySource(WeightSource):
    """A checkpoint that is made up while the model asks for it.

    Matrices are normal with variance 1 / columns, so that activations neither vanish nor overflow; norm weights are
    near 1, biases near 0. A weight depends on `seed` and its name alone.
    """

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self._seed = seed
        self._dtype = dtype
        self._shapes: dict[str, tuple[int, ...]] = {}

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
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (self._seed & 0xFFFF_FFFF))
        values = torch.randn(shape, generator=generator, dtype=torch.float32)
        if len(shape) > 1:
            values *= shape[-1] ** -0.5
        else:
            values *= 0.02
            if "norm" in name:
                values += 1.0
        return values.to(self._dtype)

    def describe(self, name: str) -> str:
        return f"dummy weights (seed {self._seed}), tensor {name!r}"
