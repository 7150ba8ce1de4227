"""Launches as real models make them, with the largest blocks of each kernel: what they use holds for smaller ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from hardpoint_torch_gpu import eight_bits, experts
from hardpoint_torch_gpu.few_rows import FewRows
from hardpoint_torch_gpu.kernels import eight_bit_gemm, paged_decode, paged_prefill, quant_gemm
from hardpoint_torch_gpu.kernels.experts import Epilogue, grouped, route
from hardpoint_torch_gpu.kernels.mla_decode import mla_decode
from hardpoint_torch_gpu.kernels.mla_prefill import mla_prefill
from hardpoint_torch_gpu.kernels.norm import LONGEST
from hardpoint_torch_gpu.kernels.norm_round import norm_round
from hardpoint_torch_gpu.kernels.prepare_heads import HeadRule, prepare_heads
from hardpoint_torch_gpu.plan import GpuPlan
from hardpoint_torch_gpu.quantized import tiling
from hardpoint_torch_gpu.rule import ScoreRule
from launches import note_adapters, note_draws, shared_plan

from hardpoint_platforms.quant import Codes, Rounding

_RULE = ScoreRule(0.1, None, None, None)
#: Columns and rows of a weight, and its rows where it is a vocabulary's.
_SIDE, _MANY = 4096, 32768
_TOKENS = (8, 16, 32, 64, 128, 256)
#: Slots of a tile of experts.
_SLOTS = (16, 32, 64, 128)
_GATED = Epilogue(gated=True, kind="silu")


def note_largest(float8: torch.dtype) -> None:
    """Attention with heads of 64 to 256 numbers; products of few and many rows, plain, quantized, of 8 bits."""
    for dtype, width in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 128),
                         (torch.float32, 256)):  # fmt: skip
        _attention(dtype, width)
    _latents()
    note_adapters()
    note_draws()
    for rows in (_SIDE, _MANY):
        w = torch.empty(rows, _SIDE, dtype=torch.bfloat16)
        for tokens in (1, 16, 32, 64):
            FewRows().product(torch.empty(tokens, _SIDE, dtype=torch.bfloat16), w, None)
    note_packed()
    for codes, kind in ((Codes.INT8, torch.int8), (Codes.FLOAT8, float8)):
        eight = _eight(codes, kind, _SIDE)
        for tokens in _TOKENS:
            rounded = eight.rounded(torch.empty(tokens, _SIDE, dtype=torch.bfloat16))
            eight_bit_gemm.eight_bit_dot(rounded, eight, None, eight_bits.cutting(eight, tokens, 128))
        for group, columns in itertools.product((0, 128), (2 * _SIDE, LONGEST)):
            x, weight = torch.empty(3, columns, dtype=torch.bfloat16), torch.empty(columns)
            norm_round(x, x, "ln", 1e-5, weight, weight, Rounding(codes, group))
    _experts(float8)


def note_packed(tokens: Iterable[int] = _TOKENS) -> None:
    """Products of quantized weights, of few and of many rows, with so many rows of x; of experts too where they fit."""
    for wide, rows in itertools.product((False, True), (_SIDE, _MANY)):
        weight = _quantized(wide, rows)
        for many in tokens:
            x = torch.empty(many, _SIDE, dtype=torch.bfloat16)
            quant_gemm.quant_dot(x, weight, None, x.dtype, tiling(weight, many, x.dtype))
    for many in {*tokens} & {*_SLOTS}:
        x, ids = torch.empty(many, _SIDE, dtype=torch.bfloat16), torch.zeros(many, 2, dtype=torch.int64)
        cut, routing = experts.cutting(many, x.dtype, True), route(ids, torch.empty(many, 2), 2, many)
        grouped(x, _quantized(False, 2 * _SIDE), None, routing, _SIDE // 2, True, _GATED, cut)


def _attention(dtype: torch.dtype, width: int) -> None:
    """32 heads over 8, two rows: prompts; one token each, stored by the kernel or before it, pages shared or not; what
    makes heads ready."""
    q = torch.empty(2, 32, width, dtype=dtype)
    new, cache = torch.empty(2, 8, width, dtype=dtype), torch.empty(64, 16, 8, width, dtype=dtype)
    paged_prefill.prefill(q, cache, cache, _plan(0, 2), 0, _RULE, None, q)
    for rotated, kind in ((width, None), (width, "rms1p"), (width // 2, "ln")):
        table, weight, places = torch.empty(64, rotated), torch.empty(width), torch.zeros(2, dtype=torch.int64)
        weights = (table, weight, weight) if kind else (table, None, None)
        prepare_heads((q, new, new), places, HeadRule(False, False, kind, 0.1), weights, places.int(), cache, cache, 16)
    for stored, plan in itertools.product(((new, new), None), (_plan(4, 0), shared_plan(4))):
        paged_decode.PagedDecode()(q, stored, cache, cache, plan, 0, _RULE, None, q)
    paged_decode.PagedDecode()(q, None, cache, cache, _plan(4, 2), 0, _RULE, None, q)  # beside prompts


def _latents() -> None:
    """Latent attention as in DeepSeek-V2 and V3: 16 and 128 heads over latents of 512 numbers and rope keys of 64."""
    pools = [torch.empty(64, 16, 1, size, dtype=torch.bfloat16) for size in (512, 64)]
    new = (torch.empty(2, 512, dtype=torch.bfloat16), torch.empty(2, 64, dtype=torch.bfloat16))
    for heads in (16, 128):
        q = torch.empty(heads, 2, 512, dtype=torch.bfloat16)
        rope = torch.empty(2, heads, 64, dtype=torch.bfloat16)
        mla_decode(q, rope, new, *pools, _plan(4, 0), 0, 0.1, q)
        mla_prefill(q, rope, *pools, _plan(0, 2), 0, 0.1, q)


def _plan(parts: int, tiles: int) -> GpuPlan:
    def counts(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    return GpuPlan(
        starts=counts(3), lengths=counts(2), tables=(counts(2, 64),), slots=(counts(2),), parts=counts(parts, 4),
        tile_rows=counts(tiles), tile_firsts=counts(tiles), page_tokens=16, padded=False,
    )  # fmt: skip


def _quantized(wide: bool, rows: int = _SIDE) -> quant_gemm.QuantWeight:
    planes, groups = _SIDE // (16 if wide else 32), _SIDE // 128
    values, scales = torch.empty(planes, rows, 4, dtype=torch.int32), torch.empty(groups, rows, dtype=torch.float16)
    return quant_gemm.QuantWeight(
        values, scales, scales[:0], torch.empty(0), torch.empty(rows // 16, dtype=torch.int32), rows, _SIDE, 128, wide
    )


def _eight(codes: Codes, kind: torch.dtype, rows: int) -> eight_bit_gemm.EightBitWeight:
    locks = torch.empty(rows // 16, dtype=torch.int32)
    return eight_bit_gemm.EightBitWeight(
        torch.empty(rows, _SIDE, dtype=kind), torch.empty(1, rows), locks, 0, 1, Rounding(codes)
    )


def _experts(float8: torch.dtype) -> None:
    """Two gated experts: tiles of every height, weights plain and of 8-bit floats."""
    rows = _SIDE
    x = torch.empty(128, _SIDE, dtype=torch.bfloat16)
    plain = torch.empty(2, rows, _SIDE, dtype=torch.bfloat16)
    eight = _eight(Codes.FLOAT8, float8, 2 * rows)
    ids, share = torch.zeros(128, 2, dtype=torch.int64), torch.empty(128, 2)
    for tokens in _SLOTS:
        routing = route(ids, share, 2, tokens)
        for weight, left, cut in (
            (plain, x, experts.cutting(tokens, x.dtype, False)),
            (eight, eight.rounded(x), experts.eight_bit_cutting(tokens, 128)),
        ):
            grouped(left, weight, None, routing, rows // 2, True, _GATED, cut)
