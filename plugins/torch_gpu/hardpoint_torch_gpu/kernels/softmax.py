"""Pieces that both attention kernels are made of: scores in powers of two, keys found through pages, online softmax.

The softmax over blocks of keys that keeps a running maximum and sum is that of Milakov and Gimelshein, 2018
(arXiv:1805.02867). Scores are multiplied with log2(e), so that its powers are those of two, which the hardware has.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def scores(product, scale, softcap, SOFTCAP: tl.constexpr):
    """Products of queries and keys as exponents of two; with a cap softcap * tanh(score / softcap)."""
    if SOFTCAP:
        score = product * scale / softcap
        e = tl.exp(-2.0 * tl.abs(score))
        return tl.where(score < 0, -LOG2E, LOG2E) * softcap * (1.0 - e) / (1.0 + e)
    return product * (scale * LOG2E)


@triton.jit
def pages(table_ptr, row, table_row, position, inside, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Pages, int64, of the cached tokens at `position` [n] of a row. MASKED: only those that are `inside` have one."""
    entry = table_ptr + row.to(tl.int64) * table_row + position // PAGE
    if MASKED:
        page = tl.load(entry, mask=inside, other=0)
    else:
        page = tl.load(entry)
    return page.to(tl.int64)


@triton.jit
def fold(score, v, best, total, mixed, PRECISION: tl.constexpr, BLIND: tl.constexpr):
    """One more block: score [m, n], its values v [n, dv] into best [m], total [m], mixed [m, dv].

    BLIND: a row may have seen no key after it.
    """
    larger = tl.maximum(best, tl.max(score, 1))
    base = larger
    if BLIND:
        base = tl.where(larger == float("-inf"), 0.0, larger)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weight, 1)
    mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
    return larger, total, mixed


@triton.jit
def add(best_of, total_of, mixed_of, best, total, mixed):
    """What other keys came to (best_of and total_of [m], mixed_of [m, dv]), if any, into best, total, mixed."""
    larger = tl.maximum(best, best_of)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    shrink, factor = tl.exp2(best - base), tl.exp2(best_of - base)
    total = total * shrink + total_of * factor
    return larger, total, mixed * shrink[:, None] + mixed_of * factor[:, None]


@triton.jit
def with_sink(sink, best, total, mixed):
    """A score that takes weight and brings no value: sink [m] (Xiao et al. 2023, as learned numbers in gpt-oss)."""
    larger = tl.maximum(best, sink * LOG2E)
    shrink = tl.exp2(best - larger)
    return total * shrink + tl.exp2(sink * LOG2E - larger), mixed * shrink[:, None]
