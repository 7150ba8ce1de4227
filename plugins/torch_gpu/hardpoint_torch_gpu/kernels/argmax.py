"""The largest logit of each row, the lowest id of equals, and whether the row is finite: two launches, one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _pieces(logits_ptr, best_ptr, at_ptr, vocab, pieces, BLOCK: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(logits_ptr + row * vocab + column, mask=inside, other=float("-inf"))
    best = tl.max(x, 0)
    bad = tl.sum(tl.where(inside & ((x != x) | (x == float("inf"))), 1, 0), 0) > 0
    at = tl.min(tl.where(x == best, column, 2147483647), 0)
    tl.store(best_ptr + row * pieces + piece, tl.where(bad, float("nan"), best))
    tl.store(at_ptr + row * pieces + piece, at)


@triton.jit
def _rows(best_ptr, at_ptr, ids_ptr, finite_ptr, pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK)
    inside = piece < pieces
    best = tl.load(best_ptr + row * pieces + piece, mask=inside, other=float("-inf"))
    at = tl.load(at_ptr + row * pieces + piece, mask=inside, other=0)
    bad = tl.sum(tl.where(best != best, 1, 0), 0) > 0
    top = tl.max(tl.where(best != best, float("-inf"), best), 0)
    chosen = tl.min(tl.where(best == top, at, 2147483647), 0)
    # A row without a finite logit still gets an id that is in the vocabulary.
    tl.store(ids_ptr + row, tl.where(chosen == 2147483647, 0, chosen).to(tl.int64))
    tl.store(finite_ptr + row, ((bad == 0) & (top > float("-inf"))).to(tl.int8))


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [R, V] -> ids int64 [R], finite bool [R]."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, _BLOCK)
    best = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
    at = torch.empty((rows, pieces), dtype=torch.int32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.int8, device=logits.device)
    if rows:
        _pieces[(rows, pieces)](logits, best, at, vocab, pieces, BLOCK=_BLOCK, num_warps=8)
        _rows[(rows,)](best, at, ids, finite, pieces, BLOCK=triton.next_power_of_2(pieces), num_warps=1)
    return ids, finite.view(torch.bool)
