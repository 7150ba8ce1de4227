"""Launches of kernels that no contract's sample reaches on the host: of one row, and of what large weights are for."""

from __future__ import annotations

import itertools

import torch
from hardpoint_torch_gpu.dense import product
from hardpoint_torch_gpu.kernels.quant_gemm import QuantWeight, Tiles, dequantize, gather, quant_dot
from hardpoint_torch_gpu.kernels.quant_gemv import quant_gemv, takes


def note_products() -> None:
    """A GEMV with and without a bias; products with quantized weights, cut in every way."""
    x, w = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(64, 4096, dtype=torch.bfloat16)
    product(x, w, None)
    product(x, w, torch.zeros(64, dtype=torch.bfloat16))
    numbers = ((False, 0), (False, 1), (False, 16), (True, 0))
    for (wide, book), offset in itertools.product(numbers, (False, True)):
        weight = _weight(wide, book, offset)
        for late, splits in ((False, 1), (True, 4)):
            quant_dot(x, weight, None, x.dtype, Tiles(64, 8, 128, 128, late, splits, 2, 4))
        if takes(weight, x.dtype):
            quant_gemv(x, weight, None, x.dtype, 128, 2, 4, 1)
        if offset:
            dequantize(weight, 0, 128, x.dtype)
        else:
            gather(weight, torch.zeros(3, dtype=torch.int64), 1.0, x.dtype)


def _weight(wide: bool, book: int, offset: bool) -> QuantWeight:
    """[128, 4096] in groups of 128."""
    values = torch.zeros(256 if wide else 128, 128, 4, dtype=torch.int32)
    scales = torch.zeros(32, 128, dtype=torch.float16)
    table, locks = torch.zeros(book, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32)
    return QuantWeight(values, scales, scales if offset else scales[:0], table, locks, 128, 4096, 128, wide)
