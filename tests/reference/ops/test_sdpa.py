"""Attention on torch's own function on ragged batches against the reference: blocks, windows, padding, cache dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import WeightSpec
from hardpoint_platforms.ops.samples import PagedRows
from hardpoint_platforms.reference.providers import reference_providers
from hardpoint_platforms.reference.sdpa import SdpaAttention
from hardpoint_platforms.reference.sdpa_plan import Need, SdpaPlanner

pytestmark = pytest.mark.reference

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def attend(
    provider: Any,
    batch: AttentionBatch,
    pages: int,
    cache: torch.dtype = torch.float32,
    garbage: float = 0.0,
    **attrs: Any,
) -> tuple[torch.Tensor, Any]:
    generator = torch.Generator().manual_seed(batch.num_tokens + pages)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = {"sinks": WeightSpec((HEADS,), torch.float32)} if attrs.get("sinks") else {}
    instance = CONTRACTS["attention"].instance(
        "here", torch.float32, weights, heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, v_head_dim=WIDTH,
        scale=0.3, **attrs,
    )  # fmt: skip
    tokens = batch.slot_mapping[0].shape[0]
    q, k, v = normal(tokens, HEADS, WIDTH), normal(tokens, KV_HEADS, WIDTH), normal(tokens, KV_HEADS, WIDTH)
    pool = tuple(normal(pages, batch.page_tokens, KV_HEADS, WIDTH).to(cache) for _ in range(2))
    if garbage:
        for part in pool:
            hide(part, batch, garbage)
    w = ((normal(HEADS),),) if weights else ()
    with torch.inference_mode():
        return provider.build(instance)(q, k, v, (pool,), provider.planner().plan(batch), *w)


def hide(part: torch.Tensor, batch: AttentionBatch, garbage: float) -> None:
    """Fill every slot that no request's history covers."""
    flat, seen = part.flatten(0, 1), torch.zeros(part.shape[0] * part.shape[1], dtype=torch.bool)
    for row in range(batch.num_requests):
        places = np.arange(batch.sequence_lengths[row])
        slots = batch.page_tables[0][row][places // batch.page_tokens] * batch.page_tokens + places % batch.page_tokens
        seen[torch.from_numpy(slots.astype(np.int64))] = True
    flat[~seen] = garbage


def compare(rows: PagedRows, batch: AttentionBatch | None = None, **options: Any) -> None:
    batch = batch or rows.batch()
    reference = next(p for p in reference_providers() if p.op == "attention")
    ours, state = attend(SdpaAttention(), batch, rows.num_pages, **options)
    theirs, wanted = attend(reference, batch, rows.num_pages, **options)
    real = batch.num_tokens
    torch.testing.assert_close(ours[:real], theirs[:real], atol=3e-5, rtol=1e-4)
    assert torch.isfinite(ours).all()
    for a, b in zip(state[0], wanted[0], strict=True):
        assert torch.equal(a[1:].nan_to_num(), b[1:].nan_to_num())


ROWS = st.lists(
    st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.just(1), st.integers(1, 40))), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(
    ROWS,
    st.sampled_from([4, 16]),
    st.sampled_from([None, 1, 7, 32]),
    st.sampled_from([{}, {"softcap": 3.0}, {"sinks": True}]),
    st.integers(0, 3),
)
def test_any_batch(
    rows: list[tuple[int, int]], page: int, window: int | None, special: dict[str, Any], more: int
) -> None:
    compare(PagedRows(tuple(rows), page_tokens=page, extra_tokens=more, extra_requests=more), window=window, **special)


@pytest.mark.parametrize("window", [None, 300, 2000])
@pytest.mark.parametrize("special", [{}, {"softcap": 3.0}])
def test_long_prompts_are_cut_into_blocks(window: int | None, special: dict[str, Any]) -> None:
    compare(PagedRows(((0, 1100), (700, 530), (1500, 1)), page_tokens=16), window=window, **special)


@pytest.mark.parametrize("window", [None, 20])
def test_what_lies_elsewhere_in_the_pool_does_not_matter(window: int | None) -> None:
    rows = PagedRows(((33, 1), (5, 1), (0, 9), (40, 6)), page_tokens=16, extra_tokens=2, extra_requests=1)
    compare(rows, window=window, garbage=float("nan"))


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float16])
def test_a_cache_in_another_dtype_rounds_alike_in_every_path(cache: torch.dtype) -> None:
    compare(PagedRows(((33, 1), (0, 9), (40, 6)), page_tokens=16), cache=cache)


@pytest.mark.parametrize("rows", [((40, 1),), ((0, 30),), ((20, 10),), ((40, 1), (9, 1))])
@pytest.mark.parametrize("window", [None, 17])
def test_pages_next_to_each_other(rows: tuple[tuple[int, int], ...], window: int | None) -> None:
    """Pages in order are read in place, without a gather."""
    shape = PagedRows(rows, page_tokens=16)
    shuffled = shape.batch()
    used = np.cumsum([0, *(-(-(old + new) // 16) for old, new in rows)])
    tables = np.zeros_like(shuffled.page_tables[0])
    slots = []
    for row, (old, new) in enumerate(rows):
        count = used[row + 1] - used[row]
        tables[row, :count] = 1 + used[row] + np.arange(count)
        at = np.arange(old, old + new)
        slots.append(tables[row, at // 16] * 16 + at % 16)
    batch = AttentionBatch(
        shuffled.query_start, shuffled.sequence_lengths, (tables,), (np.concatenate(slots).astype(np.int32),), 16,
        shuffled.num_requests, shuffled.num_tokens,
    )  # fmt: skip
    compare(shape, batch, window=window)


def test_rows_of_like_length_share_a_block_and_others_do_not() -> None:
    batch = PagedRows(((2000, 1), (1990, 1), (1500, 1), (30, 1), (4, 1)), page_tokens=16).batch()
    part = SdpaPlanner(None).plan(batch).part(Need(0, None, torch.float32, False))
    assert [rows.keys.rows for rows in part.decode] == [3, 2]
    assert sorted(int(token) for rows in part.decode for token in rows.tokens) == [0, 1, 2, 3, 4]


def test_index_work_is_done_once_per_step() -> None:
    plan = SdpaPlanner(None).plan(PagedRows(((20, 1), (3, 1))).batch())
    full = Need(0, None, torch.float32, False)
    assert plan.part(full) is plan.part(Need(0, None, torch.float32, False))
    assert plan.part(full) is not plan.part(Need(0, 4, torch.float32, False))
