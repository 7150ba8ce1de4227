"""Look-up, norms, rope, activations, sums and copies against the contracts' references, at every tail and stride."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.dense import NativeEmbedding
from hardpoint_cpu.native.pointwise import (
    NativeActivation,
    NativeAddNorm,
    NativeGatedActivation,
    NativeNorm,
    NativeRope,
)
from hardpoint_cpu.native.provider import Setting
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.ops.activation import KINDS
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.norm import KINDS as NORMS
from hardpoint_platforms.ops.rotary import rope_table
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run
from hardpoint_platforms.reference.activation import FUNCTIONS, gate_with
from hardpoint_platforms.reference.norm import normalize
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

REFERENCE = {provider.op: provider for provider in reference_providers()}
PROVIDERS = (NativeEmbedding, NativeNorm, NativeAddNorm, NativeRope, NativeActivation, NativeGatedActivation)
#: Below, at and beyond vectors of 4, 8 and 16, and beyond a block of columns.
WIDTHS = (1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 576, 2048, 2049, 4100)


def flat(tree: Any) -> list[torch.Tensor]:
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for part in tree for leaf in flat(part)]


@pytest.mark.parametrize("kind", PROVIDERS, ids=lambda kind: kind.op)
def test_samples_agree_with_the_reference(kind: Any, any_stage: Stage) -> None:
    provider, checked = kind(Setting(any_stage)), 0
    contract = CONTRACTS[provider.op]
    tolerance = contract.tolerance[torch.float32]
    for case in contract.samples(torch.float32):
        if not provider.supports(case.instance):
            continue
        for ours, theirs in zip(flat(run(provider, case)), flat(run(REFERENCE[provider.op], case)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance.atol, rtol=tolerance.rtol)
            checked += 1
    assert checked


def poisoned(rows: int, width: int, stride: int, source: Source, scale: float = 3.0) -> torch.Tensor:
    """[rows, width] inside rows of `stride`, with NaN between them."""
    whole = torch.full((rows, stride), float("nan"))
    whole[:, :width] = source.normal(rows, width, scale=scale)
    return whole[:, :width]


@pytest.mark.parametrize("kind", KINDS)
def test_activations_at_every_width(kind: str, any_stage: Stage) -> None:
    source = Source(1)
    for width in WIDTHS:
        x, out = poisoned(3, width, width + 5, source, 6.0), torch.full((3, width + 3), 7.0)
        any_stage.call(Code.ACTIVATE, 3, (x, out), (width, KINDS.index(kind), width + 5, width + 3))
        torch.testing.assert_close(out[:, :width], FUNCTIONS[kind](x), atol=2e-6, rtol=2e-6)
        assert (out[:, width:] == 7.0).all(), "nothing behind a row is written"


@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_extreme_numbers(kind: str, any_stage: Stage) -> None:
    x = torch.tensor(
        [[0.0, -0.0, 1e-6, -1e-6, 1e-3, -1e-3, 0.6, 0.65, 20.0, -20.0, 85.0, -85.0, 90.0, -95.0, 1e4, -1e4]]
    )
    out = torch.empty_like(x)
    any_stage.call(Code.ACTIVATE, 1, (x, out), (x.shape[1], KINDS.index(kind), 0, 0))
    torch.testing.assert_close(out, FUNCTIONS[kind](x), atol=1e-7, rtol=2e-6)
    x[:] = float("nan")
    any_stage.call(Code.ACTIVATE, 1, (x, out), (x.shape[1], KINDS.index(kind), 0, 0))
    assert out.isnan().all() or kind in ("relu", "relu2")


@pytest.mark.parametrize(("limit", "offset"), [(0.0, 0.0), (0.0, 1.0), (2.0, 0.0), (7.0, 1.0)])
def test_gates_with_limit_and_offset(limit: float, offset: float, any_stage: Stage) -> None:
    source = Source(2)
    for width in WIDTHS:
        x, out = poisoned(2, 2 * width, 2 * width + 3, source, 6.0), torch.empty(2, width)
        any_stage.call(Code.GATED, 2, (x, out), (width, 0, 2 * width + 3, width), (limit, offset))
        gate, up = x[:, :width], x[:, width:]
        torch.testing.assert_close(out, gate_with(gate, up, "silu", limit or None, offset), atol=1e-5, rtol=2e-6)


@pytest.mark.parametrize("kind", NORMS)
def test_norms_at_every_width(kind: str, any_stage: Stage) -> None:
    source = Source(3)
    for width in WIDTHS:
        x = poisoned(4, width, width + 2, source)
        weight, bias, out = source.normal(width), source.normal(width), torch.empty(4, width)
        for w in ((), (weight,), (weight, bias)):
            pointers = (x, *w, *(None,) * (2 - len(w)), out)
            shape = (width, NORMS.index(kind), 1, width + 2, 0, width, 0)
            any_stage.call(Code.NORM, 4, pointers, shape, (1e-5,))
            torch.testing.assert_close(out, normalize(x.double(), w, kind, 1e-5).float(), atol=2e-6, rtol=1e-5)


def test_norm_of_heads_in_place_with_a_weight_for_each(any_stage: Stage) -> None:
    source = Source(4)
    rows, heads, width = 5, 3, 20
    whole, weight = source.normal(rows, 2 * heads * width), source.normal(heads, width)
    wanted = whole.clone()
    part = wanted[:, heads * width :].view(rows, heads, width)
    part.copy_(normalize(part, (weight,), "rms", 1e-6))
    inside = whole[:, heads * width :]
    strides = (whole.stride(0), width, whole.stride(0), width, width)
    any_stage.call(Code.NORM, rows, (inside, weight, None, inside), (width, 0, heads, *strides), (1e-6,))
    torch.testing.assert_close(whole, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("target", ["residual", "x", "other"])
def test_add_norm_writes_the_sum_where_it_is_told(target: str, any_stage: Stage) -> None:
    source = Source(5)
    for width in WIDTHS:
        x, residual, weight = source.normal(3, width), source.normal(3, width), source.normal(width)
        total = x + residual
        into = {"residual": residual, "x": x, "other": torch.empty_like(x)}[target]
        out = torch.empty_like(x)
        any_stage.call(Code.ADD_NORM, 3, (x, residual, weight, None, out, into), (width, 0), (1e-6,))
        assert torch.equal(into, total)
        torch.testing.assert_close(out, normalize(total, (weight,), "rms", 1e-6), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_of_every_size(interleaved: bool, tail: bool, in_place: bool, any_stage: Stage) -> None:
    source = Source(6)
    for rotated, size in ((2, 2), (6, 7), (8, 20), (10, 24), (16, 16), (34, 40), (64, 64), (128, 192)):
        instance = CONTRACTS["rope"].instance(
            "here", torch.float32, rotary_dim=rotated, interleaved=interleaved, tail=tail
        )
        table, positions = rope_table(500, rotated, scale=1.1), source.integers(0, 500, 5)
        q, k = source.normal(5, 4, size), source.normal(5, 2, size)
        wanted = REFERENCE["rope"].build(instance)(q, k, positions, (table,))
        outs = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))
        strides = (4 * size, 2 * size, 4 * size, 2 * size)
        shape = (4, 2, rotated, size, int(interleaved), int(tail), *strides)
        any_stage.call(Code.ROPE, 5, (q, k, positions, table, *outs), shape)
        for ours, theirs in zip(outs, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_a_table_are_dequantized_exactly(scheme: str | None, dtype: torch.dtype, any_stage: Stage) -> None:
    source = Source(7)
    shapes = [(11, 256), (7, 512)] if scheme else [(11, 37), (7, 512), (3, 1)]
    for shape in shapes:
        table: Any = quantized(source, shape, SCHEMES[scheme]) if scheme else source.normal(*shape, dtype=dtype)
        ids = source.integers(0, shape[0], 9)
        provider = NativeEmbedding(Setting(any_stage))
        for scale in (1.0, 7.5):
            instance = CONTRACTS["embedding"].instance(
                "here", torch.float32, {"weight": _spec(table, shape)}, scale=scale
            )
            found = provider.build(instance)(ids, provider.pack(instance, {"weight": table}))
            plain = table.dequantize() if scheme else table.float()
            assert torch.equal(found, plain[ids] * scale)


def test_an_id_outside_the_table_gives_nan_and_reads_nothing(any_stage: Stage) -> None:
    table, out = torch.ones(4, 8), torch.zeros(4, 8)
    provider = NativeEmbedding(Setting(any_stage))
    instance = CONTRACTS["embedding"].instance("here", torch.float32, {"weight": _spec(table, (4, 8))})
    out = provider.build(instance)(torch.tensor([3, 4, -1, 1 << 40]), provider.pack(instance, {"weight": table}))
    assert out[0].eq(1).all()
    assert out[1:].isnan().all()


def _spec(table: Any, shape: tuple[int, ...]) -> Any:
    from hardpoint_platforms.ops.samples import specs

    return specs({"weight": table}, torch.float32)["weight"]


def test_gather_copy_add_and_scale(any_stage: Stage) -> None:
    source = Source(8)
    for width in WIDTHS:
        x, index, out = poisoned(6, width, width + 4, source), source.integers(0, 6, 9), torch.zeros(9, width + 1)
        any_stage.call(Code.GATHER, 9, (index, x, out), (width, width + 4, width + 1))
        assert torch.equal(out[:, :width], x[index])
        assert out[:, width].eq(0).all()
        copied = torch.zeros(6, width + 2)
        any_stage.call(Code.COPY, 6, (x, copied), (width, width + 4, width + 2))
        assert torch.equal(copied[:, :width], x)
        assert copied[:, width:].eq(0).all()
        a, b = source.normal(3, width), source.normal(3, width)
        wanted = a + b
        any_stage.call(Code.ADD, 3, (a, b, a), (width,))
        assert torch.equal(a, wanted)
        for scale, cap in ((0.25, 0.0), (2.0, 3.0), (1.0, 30.0)):
            y = poisoned(2, width, width + 1, source, 20.0)
            scaled = y * scale
            any_stage.call(Code.SCALE_CAP, 2, (y,), (width, width + 1), (scale, cap))
            expected = torch.tanh(scaled / cap) * cap if cap else scaled
            torch.testing.assert_close(y, expected, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_alone_equals_the_row_in_a_crowd(threads: int, stages: Callable[[int], Stage]) -> None:
    source, one, many = Source(9), stages(1), stages(threads)
    for width in (33, 576, 4100):
        x, residual, weight = source.normal(7, width), source.normal(7, width), source.normal(width)
        out, total = torch.empty_like(x), torch.empty_like(x)
        many.call(Code.ADD_NORM, 7, (x, residual, weight, None, out, total), (width, 0), (1e-6,))
        cut = width // 2
        gates = torch.empty(7, cut)
        many.call(Code.GATED, 7, (total, gates), (cut, 2, width, cut), (0.0, 0.0))
        for row in range(7):
            alone, sums, gate = torch.empty(1, width), torch.empty(1, width), torch.empty(1, cut)
            one.call(Code.ADD_NORM, 1, (x[row], residual[row], weight, None, alone, sums), (width, 0), (1e-6,))
            one.call(Code.GATED, 1, (sums, gate), (cut, 2, width, cut), (0.0, 0.0))
            assert torch.equal(alone[0], out[row])
            assert torch.equal(gate[0], gates[row])
