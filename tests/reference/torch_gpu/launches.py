"""Launches of kernels that no contract's sample reaches on the host: of one row, and of what large weights are for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hardpoint_torch_gpu.experts import TritonExperts
from hardpoint_torch_gpu.few_rows import FewRows
from hardpoint_torch_gpu.kernels.activate_round import activate_round
from hardpoint_torch_gpu.kernels.eight_bit_gemm import EightBitCut, EightBitWeight, eight_bit_dot
from hardpoint_torch_gpu.kernels.lora import add_adapters
from hardpoint_torch_gpu.kernels.norm_round import norm_round
from hardpoint_torch_gpu.kernels.paged_decode import PagedDecode
from hardpoint_torch_gpu.kernels.quant_gemm import QuantWeight, Tiles, dequantize, gather, quant_dot
from hardpoint_torch_gpu.kernels.quant_gemv import quant_gemv, takes
from hardpoint_torch_gpu.kernels.route import Choosing, choose
from hardpoint_torch_gpu.latent_plan import LatentPlanner
from hardpoint_torch_gpu.mla import TritonMla
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner
from hardpoint_torch_gpu.rule import ScoreRule
from hardpoint_torch_gpu.sampling import draw_tokens
from hardpoint_torch_gpu.state_space import TritonConvState, TritonGatedDelta, TritonSsmScan

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Weight
from hardpoint_platforms.ops.samples import SCHEMES, PagedRows, Source, quantized, run, sample
from hardpoint_platforms.ops.sampling import sampling_inputs
from hardpoint_platforms.quant import Codes, Rounding
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.trees import mapped


def note_products() -> None:
    """A GEMV with and without a bias; products with quantized weights, cut in every way; layers with a state."""
    note_latents()
    note_mixers()
    note_shared()
    note_choices()
    note_adapters()
    note_draws()
    x, w = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(64, 4096, dtype=torch.bfloat16)
    FewRows().product(x, w, None)
    FewRows().product(x, w, torch.zeros(64, dtype=torch.bfloat16))
    numbers = ((False, 0), (False, 1), (False, 16), (True, 0))
    for (wide, book), offset in itertools.product(numbers, (False, True)):
        weight = _weight(wide, book, offset)
        for late, splits in ((False, 1), (True, 4)):
            quant_dot(x, weight, None, x.dtype, Tiles(64, 8, 128, 128, late, splits, 2, 4))
        if takes(weight, x.dtype):
            quant_gemv(x, weight, None, x.dtype, 128, 2, 4, 1)
        if offset:
            dequantize(weight, 0, 128, x.dtype)
        else:
            gather(weight, torch.zeros(3, dtype=torch.int64), 1.0, x.dtype)


def note_latents() -> None:
    """Latent attention in float32."""
    contract = CONTRACTS["mla_attention"]
    for case in contract.samples(torch.float32):
        run(TritonMla(LatentPlanner(ReferenceDevice().upload)), case)


def note_mixers() -> None:
    """Recurrent mixers whose pool holds 16-bit numbers, as it does in a model."""
    planner = GpuPlanner(ReferenceDevice().upload)
    for provider in (TritonConvState(planner), TritonSsmScan(planner), TritonGatedDelta(planner)):
        for case in CONTRACTS[provider.op].samples(torch.bfloat16):

            def narrow(make: Callable[[], tuple[Any, ...]] = case.make) -> tuple[Any, ...]:
                *given, state, batch = make()
                return *given, mapped(state, torch.Tensor.bfloat16), batch

            run(provider, replace(case, make=narrow))


def note_shared() -> None:
    """Decodes that share pages, stored by the kernel or before it, with every kind of score that may."""
    for dtype, (softcap, sinks) in itertools.product(
        (torch.float32, torch.bfloat16), itertools.product((None, 2.0), (None, torch.zeros(4)))
    ):
        q, new = torch.zeros(2, 4, 64, dtype=dtype), torch.zeros(2, 2, 64, dtype=dtype)
        cache, rule = torch.zeros(8, 16, 2, 64, dtype=dtype), ScoreRule(0.1, None, softcap, None)
        for stored in ((new, new), None):
            PagedDecode()(q, stored, cache, cache, shared_plan(2), 0, rule, sinks, q)


def shared_plan(heads: int) -> GpuPlan:
    """Two rows that may share pages of 16 tokens; `heads`: query heads per head of keys."""
    planner = GpuPlanner(ReferenceDevice().upload)
    planner.share(0, heads, 1)
    return planner.plan(PagedRows(((20, 1), (3, 1)), page_tokens=16).batch()).with_room()


def note_choices() -> None:
    """Experts as chosen by DeepSeek-V3 and V2, Qwen3-Next and gpt-oss, from logits of either width."""
    bias = torch.zeros(256)
    for dtype in (torch.float32, torch.bfloat16):
        for how in (
            Choosing(256, 8, False, groups=8, top_groups=4, best_two=True, renormalize=True, scale=2.5),
            Choosing(160, 6, True, groups=8, top_groups=3, scale=16.0),
            Choosing(512, 10, True, renormalize=True),
            Choosing(32, 4, True, late=True),
        ):
            choose(torch.zeros(32, how.experts, dtype=dtype), bias if how.best_two else None, how)


def note_adapters() -> None:
    """Adapters of a layer of 4096 columns, for decodes and for prompts."""
    for tokens, rank in itertools.product((32, 2048), (16, 64)):
        x, slots = torch.zeros(tokens, 4096, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int64)
        a, b = torch.zeros(2, rank, 4096, dtype=x.dtype), torch.zeros(2, 4096, rank, dtype=x.dtype)
        add_adapters(x.clone(), x, slots, a, b)


def note_draws() -> None:
    """Draws out of a model's vocabulary, greedy, plain and filtered."""
    for options in ({"all_greedy": True}, {"filters": False}, {"top_p": 0.9}):
        draw_tokens(torch.zeros(2, 128256), sampling_inputs(2, **options))


def note_eight_bits(float8: torch.dtype = torch.float8_e4m3fn) -> None:
    """Rows rounded whole and by groups, held and read twice; their products, cut in every way; experts."""
    for codes, kind in ((Codes.INT8, torch.int8), (Codes.FLOAT8, float8)):
        x = torch.zeros(3, 32768, dtype=torch.bfloat16)
        for group in (0, 128):
            rounding = Rounding(codes, group)
            values, locks = torch.zeros(256, 32768, dtype=kind), torch.zeros(16, dtype=torch.int32)
            for group_rows in (1, 128):
                scales = torch.zeros(256 if group else 1, 256 // group_rows)
                weight = EightBitWeight(values, scales, locks, group, group_rows, rounding)
                rounded = weight.rounded(x)
                eight_bit_dot(rounded, weight, None, EightBitCut(64, 8, 128, 4, 4, 4))
                eight_bit_dot(rounded, weight, x[0, :256], EightBitCut(128, 128, 128, 1, 8, 4))
        for rounding in (Rounding(codes), Rounding(codes, 128)):
            activate_round(torch.zeros(3, 2 * 14336, dtype=torch.bfloat16), "silu", None, 0.0, rounding)
            activate_round(torch.zeros(3, 2 * 256, dtype=torch.bfloat16), "gelu_tanh", 7.0, 1.0, rounding)
            note_norms(rounding)
    for name in ("fp8", "fp8_block", "int8"):
        note_experts(name)


def note_norms(rounding: Rounding) -> None:
    """Norms that round what they make, in rows of a model."""
    x, weight = torch.zeros(3, 4096, dtype=torch.bfloat16), torch.zeros(4096)
    for kind, bias in (("rms", None), ("rms1p", None), ("ln", weight), ("ln", None)):
        norm_round(x, x, kind, 1e-5, weight, bias, rounding)


def note_experts(name: str) -> None:
    """Experts whose weights both are of a scheme that rounds x."""
    weights: dict[str, Weight] = {
        "gate_up": quantized(Source(1), (2, 512, 256), SCHEMES[name]),
        "down": quantized(Source(1), (2, 256, 256), SCHEMES[name]),
    }
    x, share = torch.zeros(2, 256, dtype=torch.bfloat16), torch.ones(2, 1)
    attrs = {"experts": 2, "top_k": 1, "hidden": 256, "intermediate": 256}
    ids = torch.zeros((2, 1), dtype=torch.int64)
    run(TritonExperts(), sample(CONTRACTS["experts"], name, x.dtype, lambda _: (x, share, ids), weights, **attrs))


def _weight(wide: bool, book: int, offset: bool) -> QuantWeight:
    """[128, 4096] in groups of 128."""
    values = torch.zeros(256 if wide else 128, 128, 4, dtype=torch.int32)
    scales = torch.zeros(32, 128, dtype=torch.float16)
    table, locks = torch.zeros(book, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32)
    return QuantWeight(values, scales, scales if offset else scales[:0], table, locks, 128, 4096, 128, wide)
