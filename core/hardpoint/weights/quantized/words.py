"""Integers packed into 32-bit words, as GPTQ, AWQ and compressed-tensors keep them, into the neutral packings.

A word holds 32 / bits of them, the first in its lowest bits. Files are little-endian: the bytes of a word already lie
in the order of its integers.
"""

from __future__ import annotations

import torch

from hardpoint_platforms.quant import Packing, pack_uint4

#: AWQ: column 8w + c of a row of words w is the integer in this place of its word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def packing_of(bits: int) -> Packing:
    """The packing of 4 and 8 bit integers."""
    return Packing.UINT4 if bits == 4 else Packing.INT8


def codes_of_rows(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Words along the columns, int32 [rows, ceil(columns * bits / 32)], to neutral codes of `packing_of(bits)`.

    Stored integers are unsigned; of 8 bits they become signed, 128 less.
    """
    stored = words.contiguous().view(torch.uint8)[:, : columns * bits // 8]
    return stored.contiguous() if bits == 4 else signed(stored)


def codes_of_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words along the columns of the transposed weight, int32 [columns * bits / 32, rows], to codes of its rows."""
    return codes_of_rows(words.t(), bits, words.shape[0] * 32 // bits)


def signed(stored: torch.Tensor) -> torch.Tensor:
    """uint8 to int8, 128 less."""
    return (stored ^ 0x80).view(torch.int8)


def integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] to the unsigned integers in them, int32 [..., n * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def awq_integers(words: torch.Tensor) -> torch.Tensor:
    """AWQ's int32 [..., n] to uint8 [..., 8 n]: 4-bit integers, put back into order."""
    stored = words.contiguous().view(torch.uint8)
    codes = torch.stack((stored & 15, stored >> 4), dim=-1).reshape(*words.shape, 8)
    return codes[..., _AWQ_PLACES].flatten(-2)


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """AWQ's int32 [columns, rows / 8] to neutral 4-bit codes [rows, columns / 2]."""
    return pack_uint4(awq_integers(words).t())


def one_more(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words whose integers are each one larger. A carry runs on, as the borrow did when one was taken off."""
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return (words.long() + ones).to(torch.int32)


def offsets_of(scales: torch.Tensor, zeros: torch.Tensor | int) -> torch.Tensor:
    """-scale * zero: in the scales' dtype where that loses nothing, else float32."""
    wide = -(scales.to(torch.float32) * zeros)
    narrow = wide.to(scales.dtype)
    return narrow if torch.equal(narrow.to(torch.float32), wide) else wide
