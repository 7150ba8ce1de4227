"""The largest logit of each row, the lowest id of equals, and whether the row is finite: two launches, one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.sample_pieces import BEYOND, LOWEST, Pieces, pieces_of, row_best, sound


@triton.jit
def _rows(best_ptr, at_ptr, raw_ptr, ids_ptr, finite_ptr, pieces, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PAD)
    best = tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=LOWEST)
    at = tl.load(at_ptr + row * pieces + piece, mask=piece < pieces, other=BEYOND)
    tl.store(ids_ptr + row, tl.min(tl.where(best == tl.max(best, 0), at, BEYOND), 0).to(tl.int64))
    tl.store(finite_ptr + row, sound(row_best(raw_ptr, row, pieces, PAD)).to(tl.int8))


def first_largest(pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [R], finite bool [R] of rows whose pieces are known. A NaN is larger than any number."""
    rows, device = len(pieces.best), pieces.best.device
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.int8, device=device)
    _rows[(rows,)](pieces.best, pieces.at, pieces.raw, ids, finite, pieces.count, PAD=pieces.pad, num_warps=1)
    return ids, finite.view(torch.bool)


def argmax(logits: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [R, V], contiguous, R above 0 -> ids int64 [R], finite bool [R]."""
    return first_largest(pieces_of(logits, block=block))
