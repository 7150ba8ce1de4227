"""Paged attention against the reference, and its promise: a row's bits do not depend on company, cuts or threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint_cpu.native.abi import DTYPES, Code
from hardpoint_cpu.native.attention import NativeAttention
from hardpoint_cpu.native.attention_plan import NativePlan, NativePlanner
from hardpoint_cpu.native.provider import Setting
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.attention import alibi_slopes
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import WeightSpec
from hardpoint_platforms.ops.samples import PagedRows, Source, run
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

REFERENCE: Any = next(provider for provider in reference_providers() if provider.op == "attention")
CACHES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class Model:
    heads: int = 6
    kv_heads: int = 2
    width: int = 64
    v_width: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    @property
    def scale(self) -> float:
        return float(self.width**-0.5)


def test_samples_agree_with_the_reference(any_stage: Stage) -> None:
    provider, contract = NativeAttention(Setting(any_stage), NativePlanner()), CONTRACTS["attention"]
    tolerance = contract.tolerance[torch.float32]
    for case in contract.samples(torch.float32):
        (ours, state), (theirs, wanted) = run(provider, case), run(REFERENCE, case)
        torch.testing.assert_close(ours, theirs, atol=tolerance.atol, rtol=tolerance.rtol, msg=case.instance.where)
        for part, expected in zip(state[1], wanted[1], strict=True):
            assert torch.equal(part[1:], expected[1:]), "what is stored"


class Sequences:
    """Whole sequences and what the cache holds of them: any batch that continues them can be cut from here."""

    def __init__(self, model: Model, lengths: tuple[int, ...], cache: torch.dtype, page: int, seed: int = 1) -> None:
        source = Source(seed)
        self.model, self.cache, self.page = model, cache, page
        self.q, self.k, self.v = (
            [source.normal(n, heads, width) for n in lengths]
            for heads, width in (
                (model.heads, model.width),
                (model.kv_heads, model.width),
                (model.kv_heads, model.v_width),
            )
        )
        self.sinks = source.normal(model.heads) if model.sinks else None
        self.slopes = torch.tensor(alibi_slopes(model.heads)) if model.alibi else None

    def batch(self, rows: list[tuple[int, int, int]], padding: int = 0) -> tuple[AttentionBatch, int]:
        """Rows are (sequence, tokens before, new tokens)."""
        paged = PagedRows(
            tuple((old, new) for _, old, new in rows), self.page, padding, int(padding > 0), (self.model.window,)
        )
        return paged.batch(), paged.num_pages

    def pools(self, batch: AttentionBatch, pages: int, rows: list[tuple[int, int, int]], empty: float) -> list[Any]:
        """Key and value pools with the tokens before the batch in place, `empty` everywhere else."""
        pools, scales = [], []
        for parts, width in ((self.k, self.model.width), (self.v, self.model.v_width)):
            pool = torch.full((pages * self.page, self.model.kv_heads, width), empty)
            for place, (sequence, old, _) in enumerate(rows):
                at = torch.arange(old)
                slots = torch.from_numpy(batch.page_tables[0][place].astype(np.int64))[at // self.page]
                seen = slots > 0  # pages that slid out of the window are nobody's
                pool[(slots * self.page + at % self.page)[seen]] = parts[sequence][:old][seen]
            stored, scale = stored_as(pool, self.cache)
            pools.append(stored.view(pages, self.page, self.model.kv_heads, width))
            scales.append(scale)
        return [*pools, *scales]

    def run(
        self, stage: Stage, rows: list[tuple[int, int, int]], padding: int = 0, empty: float = 0.0
    ) -> list[torch.Tensor]:
        """The outputs of each row's new tokens."""
        model = self.model
        batch, pages = self.batch(rows, padding)
        keys, values, key_scales, value_scales = self.pools(batch, pages, rows, empty)
        q, k, v = (self.joined(parts, rows, padding) for parts in (self.q, self.k, self.v))
        plan, tokens = NativePlan(batch), q.shape[0]
        out = torch.full((tokens, model.heads, model.v_width), float("nan"))
        shape = (model.heads, model.kv_heads, model.width, model.v_width, 0, model.window or 0)
        strides = (q.stride(0), k.stride(0), v.stride(0), out.stride(0))
        pointers = (q, k, v, keys, values, out, self.sinks, self.slopes, key_scales, value_scales)
        factors = (model.scale, model.softcap or 0.0)
        stage.call(Code.ATTENTION, tokens, pointers, (*shape, *strides, DTYPES[self.cache]), factors, plan)
        assert out[tokens - padding :].eq(0).all(), "padding"
        return list(out[: tokens - padding].split([new for _, _, new in rows]))

    def joined(self, parts: list[torch.Tensor], rows: list[tuple[int, int, int]], padding: int) -> torch.Tensor:
        new = [parts[sequence][old : old + new] for sequence, old, new in rows]
        return torch.cat((*new, torch.full((padding, *parts[0].shape[1:]), float("nan"))))

    def expected(self, sequence: int) -> torch.Tensor:
        """The reference over one whole sequence, on numbers rounded as the cache rounds them."""
        model, length = self.model, len(self.q[sequence])
        batch, pages = self.batch([(sequence, 0, length)])
        k, v = (read_back(*stored_as(part[sequence], self.cache)) for part in (self.k, self.v))
        weights = {"sinks": WeightSpec((model.heads,), torch.float32)} if model.sinks else {}
        instance = CONTRACTS["attention"].instance(
            "here", torch.float32, weights, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.width,
            v_head_dim=model.v_width, scale=model.scale, window=model.window, softcap=model.softcap,
            sinks=model.sinks, alibi=alibi_slopes(model.heads) if model.alibi else None,
        )  # fmt: skip
        state = tuple(torch.zeros(pages, self.page, model.kv_heads, w) for w in (model.width, model.v_width))
        plan = REFERENCE.planner().plan(batch)
        w = () if self.sinks is None else ((self.sinks,),)
        out: torch.Tensor = REFERENCE.build(instance)(self.q[sequence], k, v, (state,), plan, *w)[0]
        return out


def stored_as(x: torch.Tensor, cache: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the kernel stores rows [..., width]: int8 with a scale per row, absolute maximum / 127."""
    if cache is not torch.int8:
        return x.to(cache), None
    most = x.abs().amax(-1)
    scale = most / 127
    factor = torch.where(most > 0, torch.full_like(most, 127).div(most), 0.0)  # 127 / most multiplies by 1 / most
    return (x * factor[..., None]).round().nan_to_num(0).to(torch.int8), scale.contiguous()


def read_back(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return x.float() if scale is None else x.float() * scale[..., None]


MODELS = {
    "grouped": Model(),
    "alone": Model(heads=2, kv_heads=2),
    "pairs": Model(heads=4, kv_heads=2, width=128, v_width=128),
    "fours": Model(heads=8, kv_heads=2, width=32, v_width=32),
    "one kv head, wide": Model(heads=4, kv_heads=1, width=256, v_width=256),
    "many heads": Model(heads=71, kv_heads=1, width=16, v_width=16),
    "odd": Model(heads=3, kv_heads=3, width=20, v_width=13),
    "odd, grouped": Model(heads=10, kv_heads=2, width=80, v_width=72),
    "tiny": Model(heads=4, kv_heads=2, width=3, v_width=1),
    "window": Model(window=70),
    "narrow window": Model(window=3),
    "softcap": Model(softcap=2.0),
    "sinks, window": Model(sinks=True, window=100),
    "alibi": Model(alibi=True, width=20, v_width=20),
    "everything": Model(sinks=True, window=90, softcap=5.0, alibi=True),
}
#: One long and several short, chunks of prompts, decodes: (sequence, tokens before, new tokens).
LENGTHS = (1, 64, 65, 130, 300)
MIXED = [(4, 299, 1), (1, 63, 1), (0, 0, 1), (3, 0, 130), (2, 10, 55), (4, 0, 200)]


@pytest.mark.parametrize("cache", CACHES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_agree_with_the_reference(name: str, cache: torch.dtype, any_stage: Stage) -> None:
    sequences = Sequences(MODELS[name], LENGTHS, cache, 16)
    wanted = {sequence: sequences.expected(sequence) for sequence in range(len(LENGTHS))}
    for (sequence, old, new), out in zip(MIXED, sequences.run(any_stage, MIXED, padding=2), strict=True):
        torch.testing.assert_close(out, wanted[sequence][old : old + new], atol=5e-5, rtol=2e-4)


@pytest.mark.parametrize("cache", CACHES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", MODELS)
def test_bits_do_not_depend_on_company_cuts_or_threads(
    name: str, cache: torch.dtype, stages: Callable[[int], Stage]
) -> None:
    sequences = Sequences(MODELS[name], LENGTHS, cache, 8)
    whole = [sequences.run(stages(1), [(s, 0, n)])[0] for s, n in enumerate(LENGTHS)]
    for threads in (1, 2, 3):
        for rows in (MIXED, MIXED[::-1], [(4, 200, 100), (3, 129, 1)], [(4, 150, 3), (4, 299, 1)], [(4, 299, 1)]):
            found = sequences.run(stages(threads), rows, padding=threads % 2, empty=float("nan"))
            for (sequence, old, new), out in zip(rows, found, strict=True):
                assert torch.equal(out, whole[sequence][old : old + new]), (threads, sequence, old, new)


def test_token_by_token_equals_one_prefill(stages: Callable[[int], Stage]) -> None:
    for name in ("grouped", "everything", "odd"):
        sequences = Sequences(MODELS[name], (140,), torch.float16, 16)
        whole = sequences.run(stages(2), [(0, 0, 140)])[0]
        single = [sequences.run(stages(2), [(0, at, 1)])[0] for at in range(140)]
        assert torch.equal(torch.cat(single), whole)


def test_numbers_that_a_row_does_not_see_do_not_matter(stages: Callable[[int], Stage]) -> None:
    model = Model(window=70)
    clean = Sequences(model, (200,), torch.float32, 16)
    wanted = clean.run(stages(2), [(0, 0, 200)])[0]
    later = Sequences(model, (200,), torch.float32, 16)
    later.k[0][150:], later.v[0][150:] = float("nan"), float("inf")
    assert torch.equal(later.run(stages(2), [(0, 0, 200)])[0][:150], wanted[:150]), "keys of later tokens"
    earlier = Sequences(model, (200,), torch.float32, 16)
    earlier.k[0][:50], earlier.v[0][:50] = float("inf"), float("nan")
    assert torch.equal(earlier.run(stages(2), [(0, 0, 200)])[0][119:], wanted[119:]), "keys that left the window"


def test_a_number_that_is_not_one_is_not_hidden(stages: Callable[[int], Stage]) -> None:
    for cache in (torch.float32, torch.int8):
        for part in ("k", "v", "q"):
            sequences = Sequences(Model(), (100,), cache, 16)
            getattr(sequences, part)[0][40] = float("nan")
            out = sequences.run(stages(1), [(0, 0, 100)])[0]
            assert out[40].isnan().all()
            assert out[:40].isfinite().all()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 90))), min_size=1, max_size=5),
    page=st.sampled_from((1, 4, 7, 16, 64, 128)),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    width=st.integers(1, 70),
    window=st.one_of(st.none(), st.integers(1, 100)),
    cache=st.sampled_from(CACHES),
    threads=st.integers(1, 3),
)
def test_any_batch(
    rows: list[tuple[int, int]],
    page: int,
    group: int,
    kv_heads: int,
    width: int,
    window: int | None,
    cache: torch.dtype,
    threads: int,
    stages: Callable[[int], Stage],
) -> None:
    model = replace(Model(), heads=group * kv_heads, kv_heads=kv_heads, width=width, v_width=width, window=window)
    sequences = Sequences(model, tuple(old + new for old, new in rows), cache, page)
    work = [(place, old, new) for place, (old, new) in enumerate(rows)]
    for (place, old, _), out in zip(work, sequences.run(stages(threads), work, 1, float("nan")), strict=True):
        torch.testing.assert_close(out, sequences.expected(place)[old:], atol=5e-5, rtol=2e-4)
        assert torch.equal(out[-1:], sequences.run(stages(1), [(place, old + len(out) - 1, 1)])[0])
