"""Rows of logits cut into pieces: the largest key, its token and the sum of weights of each piece, in one launch.

Logits are compared as integer keys of the same order, so that a NaN is the largest of all. Weights are summed as
fixed-point integers: such a sum is the same in every order, so a row's draw does not depend on how it was computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Below every key, and above every token.
LOWEST: tl.constexpr = tl.constexpr(-2147483648)
BEYOND: tl.constexpr = tl.constexpr(2147483647)
_NEGATIVE_INFINITY: tl.constexpr = tl.constexpr(-2139095041)
_INFINITY: tl.constexpr = tl.constexpr(2139095040)
_COLDEST: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def order_key(x):
    """int32 of the same order as the float32 x: both zeros are equal, every NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, BEYOND, tl.where(bits < 0, bits ^ BEYOND, bits))


@triton.jit
def from_key(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ BEYOND, key).to(tl.float32, bitcast=True)


@triton.jit
def sound(key):
    """Whether a row whose largest key this is can be drawn from."""
    return (key > _NEGATIVE_INFINITY) & (key < _INFINITY)


@triton.jit
def inverse_of(temperature):
    """1 / temperature."""
    return 1.0 / tl.maximum(temperature, _COLDEST)


@triton.jit
def fixed_weight(x, best, inverse, SCALE: tl.constexpr):
    """int64: exp((x - best) / temperature) in units of 1 / SCALE; 0 where that is not a number."""
    z = (x - best) * inverse
    return (tl.where(z <= 0.0, tl.exp(z), 0.0) * SCALE).to(tl.int64)


@triton.jit
def row_best(best_ptr, row, pieces, PAD: tl.constexpr):
    """Largest key of a row."""
    piece = tl.arange(0, PAD)
    return tl.max(tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=LOWEST), 0)


@triton.jit
def piece_of(x_ptr, row, piece, vocab, BLOCK: tl.constexpr):
    """Logits of a piece, its tokens, and which of them there are."""
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    return tl.load(x_ptr + row * vocab + column, mask=inside, other=float("-inf")), column, inside


@triton.jit
def _pieces(
    x_ptr, allowed_ptr, out_ptr, temperature_ptr, best_ptr, at_ptr, raw_ptr, sum_ptr, vocab, words, pieces,
    SCALE: tl.constexpr, ALLOWED: tl.constexpr, WRITE: tl.constexpr, SUMS: tl.constexpr, TEMPERED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * pieces + piece
    x, column, inside = piece_of(x_ptr, row, piece, vocab, BLOCK)
    if WRITE:
        tl.store(raw_ptr + place, tl.max(order_key(x), 0))
        if ALLOWED:
            word = tl.load(allowed_ptr + row * words + column // 32, mask=inside, other=0)
            x = tl.where(((word >> (column % 32)) & 1) != 0, x, float("-inf"))
        tl.store(out_ptr + row * vocab + column, x, mask=inside)
    key = tl.where(inside, order_key(x), LOWEST)
    best = tl.max(key, 0)
    tl.store(best_ptr + place, best)
    tl.store(at_ptr + place, tl.min(tl.where(key == best, column, BEYOND), 0))
    if SUMS:
        if TEMPERED:
            inverse = inverse_of(tl.load(temperature_ptr + row))
        else:
            inverse = 1.0
        tl.store(sum_ptr + place, tl.sum(fixed_weight(x, from_key(best), inverse, SCALE), 0))


@dataclass(frozen=True, eq=False)
class Pieces:
    """What is known of the pieces of R rows.

    Attributes:
        block: tokens of a piece; count: pieces of a row, P.
        best: int32 [R, P], the largest key. at: int32 [R, P], the first token that has it.
        raw: int32 [R, P], the largest key before anything was masked.
        sums: int64 [R, P], weights relative to the piece's largest; None where nobody asked for them.
    """

    block: int
    count: int
    best: torch.Tensor
    at: torch.Tensor
    raw: torch.Tensor
    sums: torch.Tensor | None

    @property
    def pad(self) -> int:
        """P as a power of two."""
        return int(triton.next_power_of_2(self.count))


def block_of(vocab: int) -> int:
    """Tokens of a piece. It depends on nothing else, as a row's draw may not: pieces are 33 to 64 of 4096 and more."""
    return max(128, int(triton.next_power_of_2(triton.cdiv(vocab, 64))))


def scale_of(vocab: int) -> float:
    """Fixed-point units of weight 1, so many that the weights of a row still fit 63 bits."""
    return 2.0 ** (62 - vocab.bit_length())


def warps_of(block: int) -> int:
    """Warps of a program with one piece."""
    return 4 if block <= 2048 else 8


def pieces_of(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    sums: bool = False,
    block: int = 0,
) -> Pieces:
    """logits: float32 [R, V], contiguous. `out`, like it: what they become by the mask `allowed`, int32 [R, V / 32].

    Weights are those at `temperature`, float32 [R], or at 1.
    """
    rows, vocab = logits.shape
    block = block or block_of(vocab)
    count = triton.cdiv(vocab, block)
    # Apart, so that all are aligned whatever the number of rows: for one that is not another kernel is compiled.
    best, at, raw = (torch.empty((rows, count), dtype=torch.int32, device=logits.device) for _ in range(3))
    total = torch.empty((rows, count), dtype=torch.int64, device=logits.device) if sums else None
    mask = best if allowed is None else allowed
    _pieces[(rows, count)](
        logits, mask, logits if out is None else out, logits if temperature is None else temperature, best, at, raw,
        best if total is None else total, vocab, mask.shape[1], count, SCALE=scale_of(vocab),
        ALLOWED=allowed is not None, WRITE=out is not None, SUMS=sums, TEMPERED=temperature is not None, BLOCK=block,
        num_warps=warps_of(block),
    )  # fmt: skip
    return Pieces(block, count, best, at, best if out is None else raw, total)
