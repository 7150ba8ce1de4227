"""What both kernels over cached latents are made of: how they are cut, and the walk over a row's keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.softmax import LOG2E, fold, pages
from hardpoint_torch_gpu.limits import Limits

#: Bytes of shared memory beside queries and cached tokens: weights between the two products, sums over warps.
_OTHERS = 8 << 10


@dataclass(frozen=True)
class LatentShape:
    """How a kernel over latents is cut: queries (times heads) of a tile, cached tokens per step, warps, steps loaded
    ahead."""

    tile: int
    block: int
    warps: int
    stages: int


def latent_shape(limits: Limits, rows: int, width: int, dtype: torch.dtype) -> LatentShape:
    """The largest that shared memory holds, for up to `rows` queries, latent and rope key `width` wide together.

    The queries lie in shared memory next to the cached tokens of each step that is loaded ahead. Tiles of up to 32
    queries leave registers for two programs per multiprocessor, whose loads then overlap.
    """
    if dtype is torch.float32:
        return LatentShape(16, 16, 4, 1)  # no tensor cores: small tiles, which keep the sums in registers
    held, each = limits.shared_bytes - _OTHERS, width * dtype.itemsize
    tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
    while tile > 16 and (tile + 32) * each > held:
        tile //= 2
    block = 32 if (tile + 32) * each <= held else 16
    ahead = (tile + 2 * block) * each <= held
    return LatentShape(tile, block, 4 if tile == 16 else 8, (2 if tile == 64 else 3) if ahead else 1)


@triton.jit
def walk(
    first, last, stop, q, turned, at, c_ptr, r_ptr, table_ptr, row, scale, table_row, page_c, slot_c, page_r, slot_r,
    best, total, mixed, C: tl.constexpr, C_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Keys [first, last), in blocks. EDGE: not every query sees all of them."""
    c, r, n = tl.arange(0, C_PAD), tl.arange(0, R_PAD), tl.arange(0, BLOCK)
    for begin in range(first, last, BLOCK):
        position = begin + n
        inside = position < stop
        page, slot = pages(table_ptr, row, table_row, position, inside, PAGE, EDGE), position % PAGE
        latent_at = c_ptr + (page * page_c + slot * slot_c)[:, None] + c[None, :]
        key_at = r_ptr + (page * page_r + slot * slot_r)[None, :] + r[:, None]
        if EDGE or C < C_PAD or R < R_PAD:
            latent = tl.load(latent_at, mask=inside[:, None] & (c < C)[None, :], other=0.0).to(q.dtype)
            key = tl.load(key_at, mask=inside[None, :] & (r < R)[:, None], other=0.0).to(q.dtype)
        else:
            latent, key = tl.load(latent_at).to(q.dtype), tl.load(key_at).to(q.dtype)
        product = tl.dot(q, tl.trans(latent), input_precision="ieee")
        score = tl.dot(turned, key, product, input_precision="ieee") * (scale * LOG2E)
        if EDGE:
            score = tl.where((position[None, :] <= at[:, None]) & inside[None, :], score, float("-inf"))
        best, total, mixed = fold(score, latent, best, total, mixed, "ieee", EDGE)
    return best, total, mixed
