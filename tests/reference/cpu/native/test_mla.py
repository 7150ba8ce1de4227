"""Latent attention against the reference, and a row's bits whatever its company, its cuts and the threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint_cpu.native.abi import DTYPES, Code
from hardpoint_cpu.native.attention import NativeLatentAttention
from hardpoint_cpu.native.attention_plan import NativePlan, NativePlanner
from hardpoint_cpu.native.provider import Setting
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import WeightSpec
from hardpoint_platforms.ops.samples import PagedRows, Source, run
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

REFERENCE: Any = next(provider for provider in reference_providers() if provider.op == "mla_attention")
CACHES = (torch.float32, torch.float16, torch.bfloat16)
Rows = list[tuple[int, int, int]]  # sequence, tokens before, new tokens


@dataclass(frozen=True)
class Model:
    heads: int
    nope: int
    rope: int
    value: int
    latent: int

    @property
    def scale(self) -> float:
        return float((self.nope + self.rope) ** -0.5)


MODELS = {
    "small": Model(4, 24, 8, 16, 32),
    "one head": Model(1, 16, 8, 16, 64),
    "many heads": Model(70, 12, 16, 12, 48),
    "wide": Model(5, 128, 64, 128, 256),
    "odd": Model(3, 7, 5, 9, 37),
}


def test_samples_agree_with_the_reference(any_stage: Stage) -> None:
    provider, contract = NativeLatentAttention(Setting(any_stage), NativePlanner()), CONTRACTS["mla_attention"]
    tolerance = contract.tolerance[torch.float32]
    for case in contract.samples(torch.float32):
        (ours, state), (theirs, wanted) = run(provider, case), run(REFERENCE, case)
        torch.testing.assert_close(ours, theirs, atol=tolerance.atol, rtol=tolerance.rtol, msg=case.instance.where)
        for part, expected in zip(state[0], wanted[0], strict=True):
            assert torch.equal(part[1:], expected[1:]), "what is stored"


class Sequences:
    """Whole sequences; any batch that continues them can be cut from here."""

    def __init__(self, model: Model, lengths: tuple[int, ...], cache: torch.dtype, page: int) -> None:
        source = Source(2)
        self.model, self.cache, self.page = model, cache, page
        self.q_nope = [source.normal(n, model.heads, model.nope) for n in lengths]
        self.q_rope = [source.normal(n, model.heads, model.rope) for n in lengths]
        self.latent = [source.normal(n, model.latent) for n in lengths]
        self.k_rope = [source.normal(n, model.rope) for n in lengths]
        rows = model.heads * (model.nope + model.value)
        self.kv_b = source.matrix(rows, model.latent, torch.float32)

    def run(self, stage: Stage, rows: Rows, padding: int = 0, empty: float = 0.0) -> list[torch.Tensor]:
        model = self.model
        paged = PagedRows(tuple((old, new) for _, old, new in rows), self.page, padding, int(padding > 0))
        batch = paged.batch()
        pools = []
        for parts, width in ((self.latent, model.latent), (self.k_rope, model.rope)):
            pool = torch.full((paged.num_pages * self.page, width), empty)
            for place, (sequence, old, _) in enumerate(rows):
                at = torch.arange(old)
                slots = torch.from_numpy(batch.page_tables[0][place].astype(np.int64))[at // self.page]
                pool[slots * self.page + at % self.page] = parts[sequence][:old]
            pools.append(pool.to(self.cache).view(paged.num_pages, self.page, 1, width))
        inputs = [
            torch.cat(
                (
                    *(parts[sequence][old : old + new] for sequence, old, new in rows),
                    torch.full((padding, *parts[0].shape[1:]), float("nan")),
                )
            )
            for parts in (self.q_nope, self.q_rope, self.latent, self.k_rope)
        ]
        tokens = inputs[0].shape[0]
        out = torch.full((tokens, model.heads, model.value), float("nan"))
        shape = (model.heads, model.nope, model.rope, model.latent, model.value, 0)
        strides = tuple(part.stride(0) for part in inputs)
        pointers = (*inputs, *pools, self.kv_b, out)
        plan = NativePlan(batch)
        stage.call(Code.MLA, tokens, pointers, (*shape, *strides, DTYPES[self.cache]), (model.scale,), plan)
        assert out[tokens - padding :].eq(0).all(), "padding"
        return list(out[: tokens - padding].split([new for _, _, new in rows]))

    def expected(self, sequence: int) -> torch.Tensor:
        model, length = self.model, len(self.latent[sequence])
        paged = PagedRows(((0, length),), self.page)
        instance = CONTRACTS["mla_attention"].instance(
            "here", torch.float32, {"kv_b": WeightSpec(tuple(self.kv_b.shape), torch.float32)}, heads=model.heads,
            nope_dim=model.nope, rope_dim=model.rope, v_head_dim=model.value, latent_dim=model.latent,
            scale=model.scale,
        )  # fmt: skip
        state = tuple(torch.zeros(paged.num_pages, self.page, 1, width) for width in (model.latent, model.rope))
        stored = (part[sequence].to(self.cache).float() for part in (self.latent, self.k_rope))
        plan = REFERENCE.planner().plan(paged.batch())
        queries = (self.q_nope[sequence], self.q_rope[sequence])
        out: torch.Tensor = REFERENCE.build(instance)(*queries, *stored, (state,), plan, (self.kv_b,))[0]
        return out


LENGTHS = (1, 64, 65, 230)
MIXED = [(3, 229, 1), (1, 63, 1), (0, 0, 1), (2, 10, 55), (3, 0, 200), (3, 100, 3)]


@pytest.mark.parametrize("cache", CACHES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_agree_with_the_reference(name: str, cache: torch.dtype, any_stage: Stage) -> None:
    sequences = Sequences(MODELS[name], LENGTHS, cache, 16)
    wanted = [sequences.expected(sequence) for sequence in range(len(LENGTHS))]
    for (sequence, old, new), out in zip(MIXED, sequences.run(any_stage, MIXED, padding=2), strict=True):
        torch.testing.assert_close(out, wanted[sequence][old : old + new], atol=1e-4, rtol=3e-4)


@pytest.mark.parametrize("cache", CACHES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", MODELS)
def test_bits_do_not_depend_on_company_cuts_or_threads(
    name: str, cache: torch.dtype, stages: Callable[[int], Stage]
) -> None:
    sequences = Sequences(MODELS[name], LENGTHS, cache, 8)
    whole = [sequences.run(stages(1), [(s, 0, n)])[0] for s, n in enumerate(LENGTHS)]
    for threads in (1, 2, 3):
        for rows in (MIXED, MIXED[::-1], [(3, 150, 80), (2, 64, 1)], [(3, 226, 4)], [(3, 229, 1)]):
            found = sequences.run(stages(threads), rows, padding=threads % 2, empty=float("nan"))
            for (sequence, old, new), out in zip(rows, found, strict=True):
                assert torch.equal(out, whole[sequence][old : old + new]), (threads, sequence, old, new)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 90))), min_size=1, max_size=4),
    page=st.sampled_from((1, 7, 16, 64)),
    model=st.builds(
        Model, st.integers(1, 50), st.integers(1, 40), st.integers(1, 20), st.integers(1, 40), st.integers(1, 70)
    ),
    cache=st.sampled_from(CACHES),
    threads=st.integers(1, 3),
)
def test_any_batch(
    rows: list[tuple[int, int]],
    page: int,
    model: Model,
    cache: torch.dtype,
    threads: int,
    stages: Callable[[int], Stage],
) -> None:
    sequences = Sequences(model, tuple(old + new for old, new in rows), cache, page)
    work = [(place, old, new) for place, (old, new) in enumerate(rows)]
    for (place, old, _), out in zip(work, sequences.run(stages(threads), work, 1, float("nan")), strict=True):
        torch.testing.assert_close(out, sequences.expected(place)[old:], atol=1e-4, rtol=3e-4)
        assert torch.equal(out[-1:], sequences.run(stages(1), [(place, old + len(out) - 1, 1)])[0])
