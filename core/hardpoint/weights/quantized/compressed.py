"""compressed-tensors: float8 and int8 products, and integers packed for weight-only use.

    float-quantized, int-quantized, naive-quantized
        X.weight              float8_e4m3fn or int8 [rows, columns]
        X.weight_scale        one number, one per row, or one per block
    pack-quantized
        X.weight_packed       int32 [rows, ceil(columns * bits / 32)]
        X.weight_shape        int64 [2]
        X.weight_scale        [rows, groups]
    either, where it is not symmetric
        X.weight_zero_point   as the scales; of pack-quantized int32 [ceil(rows * bits / 32), groups]
    either, where columns were sorted
        X.weight_g_idx        int32 [columns]: the group of each column

Which modules are quantized is told by their tensors; what they are, by `config_groups`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hardpoint.errors import ModelError
from hardpoint.weights.quantized.compressed_groups import Group, find_group, groups_of
from hardpoint.weights.quantized.float8 import float8_scheme, read_codes
from hardpoint.weights.quantized.grids import Grid, grid_of, on_grid, scales_on
from hardpoint.weights.quantized.method import Layout, Method, Stored, in_order, is_in_order, plain_if, rounding_of
from hardpoint.weights.quantized.words import codes_of_rows, integers, offsets_of, packing_of
from hardpoint_platforms.ops.contract import Weight
from hardpoint_platforms.quant import QuantScheme, QuantTensor

_WORDS = (torch.int32,)
_ZEROS = (torch.int8, torch.int32, torch.int64)
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "dense")


class CompressedTensors(Method):
    """`compressed-tensors`."""

    ends: Mapping[str, str] = {
        "_packed": "packed",
        "_scale": "scales",
        "_zero_point": "zeros",
        "_shape": "sides",
        "_g_idx": "order",
    }
    own = "values"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._groups = groups_of(config)
        formats = {str(config.get("format") or "dense"), *(group.format for group in self._groups if group.format)}
        sparse = config.get("sparsity_config") or {}
        unread = sorted(formats.difference(_FORMATS))
        if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
            unread.append(f"sparse {sparse['format']}")
        if (config.get("transform_config") or {}).get("config_groups"):
            unread.append("transform_config (rotations of the inputs)")
        if unread:
            raise ModelError(
                f"config.json: 'quantization_config' asks for {', '.join(unread)}, which is not read; read are "
                f"{', '.join(_FORMATS[:4])}",
                hint="use another quantization of the model",
            )

    def layout(self, stored: Stored) -> Layout:
        group = find_group(self._groups, stored)
        if not group.integers:
            shape = stored.shape("values", (torch.float8_e4m3fn,), (2, 3))
            rounding = rounding_of(stored, group.rounding, shape[-1])
            return Layout(shape, float8_scheme(grid_of(stored, shape, group.block), rounding))
        shape = self._packed_shape(stored, group) if stored.has("packed") else stored.shape("values", (torch.int8,))
        grid = grid_of(stored, shape, group.block)
        if not group.symmetric:
            stored.expect("zeros", _ZEROS, *_zero_shapes(stored, shape, grid, group))
        offset = not group.symmetric or _is_unsigned(stored, group)
        if grid.group_rows > 1 and offset:
            raise stored.wrong(
                "blocks of scales are read with 8 bits and no zero points alone",
                stored.any,
                hint="use another quantization of the model",
            )
        packing = packing_of(group.bits if stored.has("packed") else 8)
        scheme = QuantScheme(
            f"int{group.bits}",
            packing,
            group.bits,
            grid.group,
            offset=offset,
            group_rows=grid.group_rows,
            rounding=rounding_of(stored, group.rounding, shape[1]),
        )
        return plain_if(Layout(shape, scheme), not is_in_order(stored, shape[1], grid.group))

    def read(self, stored: Stored, layout: Layout) -> Weight:
        group = find_group(self._groups, stored)
        if not group.integers:
            return read_codes(stored, layout, stored.load("values"))
        shape, scheme = layout.shape, layout.scheme
        grid = grid_of(stored, shape, group.block)
        scales = scales_on(stored, shape, grid)
        packed = stored.has("packed")
        values = codes_of_rows(stored.load("packed"), group.bits, shape[1]) if packed else stored.load("values")
        zero: torch.Tensor | int = 8 if _is_unsigned(stored, group) else 0
        if not group.symmetric:
            zero = zero + _zeros(stored, shape, grid, group)
        offsets = None if isinstance(zero, int) and zero == 0 else offsets_of(scales, zero)
        if scheme is not None:
            return QuantTensor(scheme, shape, values, scales, offsets)
        own = QuantScheme(
            "", packing_of(group.bits if packed else 8), group.bits, grid.group, offset=offsets is not None
        )
        return in_order(QuantTensor(own, shape, values, scales, offsets), stored.load("order").long())

    def notes(self) -> list[str]:
        told = [f"inputs are not rounded: {group.left_out}" for group in self._groups if group.left_out]
        if self.config.get("kv_cache_scheme"):
            told.append("kv_cache_scheme: the KV cache has the dtype of --kv-dtype")
        return list(dict.fromkeys(told))

    def _packed_shape(self, stored: Stored, group: Group) -> tuple[int, int]:
        rows, words = stored.shape("packed", _WORDS)
        if group.bits not in (4, 8):
            raise stored.wrong(
                f"integers of {group.bits} bits are not read, those of 4 and 8 are",
                "packed",
                hint="use another quantization of the model",
            )
        stored.expect("sides", (torch.int64, torch.int32), (2,))
        sides = tuple(int(side) for side in stored.load("sides"))
        if sides[0] != rows or sides[1] < 1 or -(-sides[1] * group.bits // 32) != words:
            raise stored.wrong(
                f"the shape is {list(sides)}, which {[rows, words]} words of 32 bits do not hold", "packed"
            )
        if group.bits == 4 and sides[1] % 2:
            raise stored.wrong(
                f"{sides[1]} columns cannot lie two to a byte",
                "packed",
                hint="use another quantization of the model",
            )
        return rows, sides[1]


def _is_unsigned(stored: Stored, group: Group) -> bool:
    """Whether neutral codes are unsigned, which have zero at 8."""
    return stored.has("packed") and group.bits == 4


def _zero_shapes(stored: Stored, shape: tuple[int, ...], grid: Grid, group: Group) -> list[tuple[int, ...]]:
    """Packed along the rows, or one by one beside the scales."""
    rows, groups = shape[0], shape[1] // grid.group
    one_by_one: list[tuple[int, ...]] = [(rows, groups), (rows,), (1, 1), (1,), ()] if groups == 1 else [(rows, groups)]
    return [(-(-rows * group.bits // 32), groups), *one_by_one] if stored.has("packed") else one_by_one


def _zeros(stored: Stored, shape: tuple[int, ...], grid: Grid, group: Group) -> torch.Tensor:
    """Signed zero points, int32 [rows, groups]."""
    zeros = stored.load("zeros")
    if zeros.dtype is torch.int32 and stored.has("packed") and zeros.shape[:1] == (-(-shape[0] * group.bits // 32),):
        unsigned = integers(zeros.t().contiguous(), group.bits)[:, : shape[0]].t()
        return unsigned - (1 << group.bits - 1)
    return on_grid(zeros.to(torch.int32), shape, grid)
