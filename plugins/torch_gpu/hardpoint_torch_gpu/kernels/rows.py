"""Rows of an operand as products read them, some columns of a tile at a time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_rows(start, k, there, columns, EVEN: tl.constexpr, FULL: tl.constexpr):
    """Columns `k` of the rows that begin at `start`. EVEN: no column is behind the last one; FULL: all rows are there.

    Rows that are not `there` are not read: all programs together read activations as often as the weight has tiles.
    """
    if EVEN and FULL:
        x = tl.load(start + k)
    elif EVEN:
        x = tl.load(start + k, mask=there, other=0.0)
    elif FULL:
        x = tl.load(start + k, mask=k < columns, other=0.0)
    else:
        x = tl.load(start + k, mask=there & (k < columns), other=0.0)
    return x
