"""Log-probabilities of chosen tokens, their ranks, and the likeliest tokens, without a sort over the vocabulary.

The k-th largest of the pieces' largest logits bounds the k likeliest tokens from below: only pieces that reach it, or
the chosen token, are read a second time, and what reaches it is listed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_platforms.batch import Logprobs
from hardpoint_torch_gpu.kernels.sample_pieces import (
    BEYOND,
    LOWEST,
    from_key,
    order_key,
    pieces_of,
    scale_of,
    warps_of,
)

#: Longest list of a row; where more tokens reach the bound, the row itself is searched.
LONGEST = 4096


@triton.jit
def _cut(best_ptr, row, pieces, k, PAD: tl.constexpr):
    """A key that at least k tokens of the row reach; LOWEST where pieces are fewer than k."""
    piece = tl.arange(0, PAD)
    keys = tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=LOWEST)
    reach = tl.sum((keys[None, :] >= keys[:, None]).to(tl.int32), 1)
    return tl.max(tl.where((reach >= k) & (piece < pieces), keys, LOWEST), 0)


@triton.jit(do_not_specialize=["k"])
def _likely(
    x_ptr, best_ptr, tokens_ptr, found_ptr, list_ptr, vocab, pieces, room, k, TOP: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.load(best_ptr + row * pieces + piece)
    chosen = order_key(tl.load(x_ptr + row * vocab + tl.load(tokens_ptr + row)))
    if TOP:
        cut = _cut(best_ptr, row, pieces, k, PAD)
        bound = tl.minimum(cut, chosen)
    else:
        bound = chosen
    if best < bound:
        return
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    key = order_key(tl.load(x_ptr + row * vocab + column, mask=inside, other=float("-inf")))
    larger = tl.sum((inside & (key > chosen)).to(tl.int32), 0)
    if larger > 0:
        tl.atomic_add(found_ptr + row * 2, larger, sem="relaxed")
    if TOP:
        listed = (inside & (key >= cut)).to(tl.int32)
        number = tl.sum(listed, 0)
        if number > 0:
            base = tl.atomic_add(found_ptr + row * 2 + 1, number, sem="relaxed")
            place = base + tl.cumsum(listed, 0) - 1
            tl.store(list_ptr + row * room + place, column, mask=(listed > 0) & (place < room))


@triton.jit(do_not_specialize=["k"])
def _score(
    x_ptr, best_ptr, sum_ptr, tokens_ptr, found_ptr, list_ptr, chosen_ptr, rank_ptr, top_ids_ptr, top_ptr, vocab,
    pieces, room, k, SCALE: tl.constexpr, TOP: tl.constexpr, PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PAD)
    inside = piece < pieces
    keys = tl.load(best_ptr + row * pieces + piece, mask=inside, other=LOWEST)
    sums = tl.load(sum_ptr + row * pieces + piece, mask=inside, other=0)
    most = from_key(tl.max(keys, 0))
    factor = tl.exp(tl.where(sums > 0, from_key(keys) - most, 0.0).to(tl.float64))
    total = tl.sum(tl.where(sums > 0, sums.to(tl.float64) * factor, 0.0), 0) * (1.0 / SCALE)
    share = tl.log(total).to(tl.float32)
    chosen = tl.load(x_ptr + row * vocab + tl.load(tokens_ptr + row))
    tl.store(chosen_ptr + row, chosen - most - share)
    tl.store(rank_ptr + row, tl.load(found_ptr + row * 2).to(tl.int64) + 1)
    if TOP:
        cut = _cut(best_ptr, row, pieces, k, PAD)
        span = tl.load(found_ptr + row * 2 + 1)
        from_list = span <= room
        listed = tl.where(from_list, span, 0)
        span = tl.where(from_list, span, vocab)
        # Key and id as one number, lower ids larger: the next one is the largest below the one before.
        before = tl.full([], 9223372036854775807, tl.int64)
        for place in range(k):
            largest = tl.full([CHUNK], -9223372036854775807, tl.int64)
            for at in range(0, span, CHUNK):
                entry = at + tl.arange(0, CHUNK)
                token = tl.load(list_ptr + row * room + entry, mask=entry < listed, other=0)
                token = tl.where(from_list, token, entry)
                key = order_key(tl.load(x_ptr + row * vocab + token, mask=entry < span, other=float("-inf")))
                both = (key.to(tl.int64) << 32) | (token ^ BEYOND).to(tl.int64)
                usable = (entry < span) & (key >= cut) & (both < before)
                largest = tl.where(usable & (both > largest), both, largest)
            before = tl.max(largest, 0)
            tl.store(top_ids_ptr + row * k + place, (before & BEYOND) ^ BEYOND)
            tl.store(top_ptr + row * k + place, from_key((before >> 32).to(tl.int32)) - most - share)


def score(logits: torch.Tensor, token_ids: torch.Tensor, k: int, block: int = 0, longest: int = LONGEST) -> Logprobs:
    """Of float32 [N, V], contiguous, N above 0: the tokens int64 [N], and the min(k, V) likeliest; of equals the
    lower id comes first. `longest`: of the list that is searched.
    """
    rows, vocab = logits.shape
    k, room, device = min(k, vocab), min(vocab, longest), logits.device
    pieces = pieces_of(logits, sums=True, block=block)
    tokens = token_ids.contiguous()
    found = torch.zeros((rows, 2), dtype=torch.int32, device=device)
    listed = torch.empty((rows, room), dtype=torch.int32, device=device)
    scores = Logprobs(
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty((rows, k), dtype=torch.int64, device=device),
        torch.empty((rows, k), dtype=torch.float32, device=device),
    )
    _likely[(rows, pieces.count)](
        logits, pieces.best, tokens, found, listed, vocab, pieces.count, room, k, TOP=k > 0, PAD=pieces.pad,
        BLOCK=pieces.block, num_warps=warps_of(pieces.block),
    )  # fmt: skip
    _score[(rows,)](
        logits, pieces.best, pieces.sums, tokens, found, listed, scores.chosen, scores.rank, scores.top_ids,
        scores.top, vocab, pieces.count, room, k, SCALE=scale_of(vocab), TOP=k > 0, PAD=pieces.pad, CHUNK=512,
        num_warps=4,
    )  # fmt: skip
    return scores
