"""Products of float32 blocks on tensor cores that take 16-bit numbers, as every GPU and every Triton has them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wide_dot(a, b, sums, HALVES: tl.constexpr):
    """sums + a b, sums float32. HALVES: of a float32 number 16 bits count, as two of bfloat16, in which an operand may
    also come; else a and b are float32, and all their bits count.

    The product of two lower halves is left out: it is smaller than what the 16 bits lose.
    """
    if HALVES:
        high_a, high_b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        if a.dtype != tl.bfloat16:
            sums = tl.dot((a - high_a.to(tl.float32)).to(tl.bfloat16), high_b, sums)
        if b.dtype != tl.bfloat16:
            sums = tl.dot(high_a, (b - high_b.to(tl.float32)).to(tl.bfloat16), sums)
        return tl.dot(high_a, high_b, sums)
    else:
        return tl.dot(a, b, sums, input_precision="ieee")
