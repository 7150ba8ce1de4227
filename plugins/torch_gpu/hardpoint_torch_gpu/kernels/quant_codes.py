"""Packed integers of a quantized weight to numbers, in registers; and the sum over programs that share columns.

A weight [N, K] lies in planes of 16 bytes per row: int32 [planes, N, 4], so that any number of rows is read in one
run. A plane holds C columns, 32 of 4 bits or 16 of 8. Column 8 i + 2 t + b of it (t < 4, b < 2) is in word t, in
field i of the lower (b = 0) or upper (b = 1) 16 bits. One shift and one mask make two neighbours of one word, already
at the distance that a pair of 16-bit floats has, and thread t of four owns what the tensor cores want of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pairs(v, dtype: tl.constexpr):
    """int32 of two 16-bit floats each -> [..., 2] of them."""
    low = v.to(tl.int16).to(dtype, bitcast=True)
    high = (v >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def codes(
    w, book_ptr, dtype: tl.constexpr, BYTES: tl.constexpr, TABLE: tl.constexpr, FLOATS: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    """w int32 [R, P, 4] -> the numbers before scales, `dtype` [R, P * C], columns in order.

    BYTES: signed bytes, else 4 bits: TABLE: an index into 16 numbers; FLOATS: e2m1 times two; SIGNED: integer less 8.
    16-bit floats are made by writing the integer into the mantissa of 128 (bfloat16) or 1024 (float16).
    """
    FIELDS: tl.constexpr = 2 if BYTES else 4
    shift = tl.arange(0, FIELDS) * (16 // FIELDS)
    v = w[:, :, None, :] >> shift[None, None, :, None]
    if TABLE:
        q = tl.join(tl.load(book_ptr + (v & 15)), tl.load(book_ptr + ((v >> 16) & 15)))
    elif dtype == tl.float32:
        q = _wide(tl.join(v, v >> 16), BYTES, FLOATS, SIGNED)
    elif FLOATS:
        # Sign on top, exponent and mantissa at the low end of the exponent: that small, then scaled up.
        UP: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
        BACK: tl.constexpr = 2.0**127 if dtype == tl.bfloat16 else 2.0**15
        q = (_pairs(((v << 12) & -2147450880) | ((v & 0x00070007) << UP), dtype) * BACK).to(dtype)
    else:
        ONE: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        if BYTES:
            # Lower seven bits less 128 where the eighth is set.
            q = _pairs((v & 0x007F007F) | ONE, dtype) - _pairs((v & 0x00800080) | ONE, dtype)
        else:
            EXTRA: tl.constexpr = (128 if dtype == tl.bfloat16 else 1024) + (8 if SIGNED else 0)
            q = (_pairs((v & 0x000F000F) | ONE, dtype) - EXTRA).to(dtype)
    return q.reshape(w.shape[0], w.shape[1] * FIELDS * 8)


@triton.jit
def _wide(v, BYTES: tl.constexpr, FLOATS: tl.constexpr, SIGNED: tl.constexpr):
    """The lowest field of each integer, as float32."""
    if BYTES:
        q = (((v & 255) ^ 128) - 128).to(tl.float32)
    elif FLOATS:
        size = v & 7
        size = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16))
        q = tl.where((v & 8) == 0, size, -size).to(tl.float32)
    else:
        q = ((v & 15) - (8 if SIGNED else 0)).to(tl.float32)
    return q


@triton.jit
def finish(total, bias, y, mask, parts, stride, lock, split, splits, SHARED: tl.constexpr):
    """Store `total` + `bias` at the pointers `y`; of `splits` programs the last to arrive adds all, in their order.

    parts: pointers of split 0, of `total`'s shape; `stride` to the next split's. `lock` is 0 before and after.
    """
    if not SHARED:
        tl.store(y, (total + bias).to(y.dtype.element_ty), mask=mask)
    else:
        tl.store(parts + split * stride, total)
        tl.debug_barrier()
        arrived = tl.atomic_add(lock, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            whole = tl.zeros_like(total)
            for other in range(splits):
                whole += tl.load(parts + other * stride, cache_modifier=".cg")
            tl.store(y, (whole + bias).to(y.dtype.element_ty), mask=mask)
            tl.store(lock, 0)
