"""FP8 weights: `fp8` (one scale per weight, or per block), `fbgemm_fp8` (one per row), and ModelOpt's FP8.

    X.weight            float8_e4m3fn [rows, columns]
    X.weight_scale_inv  [ceil(rows / 128), ceil(columns / 128)]: despite its name what codes are multiplied by
    X.weight_scale      one number, or one per row

Their inputs are rounded to float8, token by token. Scales of inputs that a checkpoint was calibrated to are not used:
each token's own largest magnitude loses less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hardpoint.errors import ModelError
from hardpoint.weights.quantized.grids import Block, Grid, grid_of, scales_on
from hardpoint.weights.quantized.method import Layout, Method, Stored, rounding_of
from hardpoint_platforms.ops.contract import Weight
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, QuantTensor, Rounding

_FLOAT8 = (torch.float8_e4m3fn,)


class Float8(Method):
    """`fp8` and `fbgemm_fp8`."""

    ends: Mapping[str, str] = {"_scale_inv": "scales", "_scale": "scales"}
    own = "values"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._block = block_of(config.get("weight_block_size"), "weight_block_size")
        scheme = config.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise ModelError(
                f"config.json: 'quantization_config' says activation_scheme is {scheme!r}; known are dynamic, static"
            )
        if config.get("fmt", "e4m3") != "e4m3" or config.get("expert_dtype", "fp8") != "fp8":
            raise ModelError(
                "config.json: 'quantization_config' asks for a kind of float8 that is not read: only e4m3 is"
            )

    def layout(self, stored: Stored) -> Layout:
        shape = stored.shape("values", _FLOAT8, (2, 3))
        grid = grid_of(stored, shape, self._block)
        rounding = Rounding(Codes.FLOAT8, self._block[1] if self._block else 0)
        return Layout(shape, float8_scheme(grid, rounding_of(stored, rounding, shape[-1])))

    def read(self, stored: Stored, layout: Layout) -> Weight:
        return read_codes(stored, layout, stored.load("values"))


class ModelOpt(Float8):
    """ModelOpt's FP8: one scale per weight."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("quant_algo") != "FP8":
            raise ModelError(
                f"config.json: 'quantization_config' says 'modelopt' with quant_algo {config.get('quant_algo')!r}; "
                "only 'FP8' is read",
                hint="use another quantization of the model",
            )
        super().__init__({})


def block_of(value: Any, key: str) -> Block | None:
    """Rows and columns per scale out of a config: [128, 128] or "128x128". Raises ModelError."""
    if value is None:
        return None
    sides = [int(side) for side in value.split("x")] if isinstance(value, str) else value
    if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(type(n) is int and n > 0 for n in sides):
        raise ModelError(f"config.json: 'quantization_config' says {key!r} is {value!r}, must be two positive integers")
    return sides[0], sides[1]


def float8_scheme(grid: Grid, rounding: Rounding | None) -> QuantScheme:
    """The scheme of float8 weights."""
    name = "fp8" if grid.group_rows == 1 else "fp8_block"
    return QuantScheme(name, Packing.FLOAT8, 8, grid.group, group_rows=grid.group_rows, rounding=rounding)


def read_codes(stored: Stored, layout: Layout, values: torch.Tensor) -> QuantTensor:
    """A weight of one number per column, under the scales of its layout's scheme."""
    scheme = layout.scheme
    if scheme is None:
        raise TypeError(f"{stored.name} was announced as plain")
    grid = Grid(scheme.group, scheme.group_rows)
    return QuantTensor(scheme, layout.shape, values, scales_on(stored, layout.shape, grid))
