"""What a device can do at most, measured on request: the yardstick that kernels are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """Rates that no kernel can pass, as simple loops reach them on the opened device with all of its threads.

    Attributes:
        bytes_per_second: streaming reads from memory, of data too large for any cache.
        multiply_adds_per_second: by kind of number that is multiplied ("float32", "bfloat16", "int8" ...), sums in
            registers; a kind that the device has no kernels for is absent.
    """

    bytes_per_second: float
    multiply_adds_per_second: Mapping[str, float]
