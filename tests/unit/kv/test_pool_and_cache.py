"""Free list, reference counts, LRU, hash chains, group arithmetic, sizing: worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError, EngineError
from hardpoint.kv.block_pool import BlockPool
from hardpoint.kv.groups import GroupTable, capacity_tokens, first_column, peak_pages, span_columns
from hardpoint.kv.prefix_cache import HashChain, PrefixCache
from hardpoint.kv.sizing import plan_pages


def test_the_pool_gives_free_pages_first_and_then_the_oldest_idle_ones() -> None:
    cache = PrefixCache(1)
    pool = BlockPool(6, cache)
    pages = pool.take(5)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    for page in pages[:3]:
        cache.register(0, bytes([page]), page)
    pool.drop([pages[1], pages[0], pages[2], pages[3]])
    assert (pool.free, pool.idle, pool.available) == (1, 3, 4)
    assert pool.take(1) == [pages[3]]
    pool.hold([pages[1], 0])
    pool.check_integrity()
    assert pool.take(2) == [pages[0], pages[2]]
    assert [page in cache for page in pages] == [False, True, False, False, False]
    pool.check_integrity()


def test_the_pool_sees_its_own_damage() -> None:
    cache = PrefixCache(1)
    pool = BlockPool(4, cache)
    (page,) = pool.take(1)
    pool.drop([page])
    pool._free.append(page)
    with pytest.raises(EngineError, match=f"pages \\[{page}\\]"):
        pool.check_integrity()
    pool._free.pop()
    cache.register(0, b"x", page)
    with pytest.raises(EngineError, match="has a name"):
        pool.check_integrity()


def test_the_cache_keeps_the_first_page_of_a_prefix_and_one_name_per_page() -> None:
    cache = PrefixCache(2)
    assert cache.register(0, b"a", 5)
    assert not cache.register(0, b"a", 6)
    assert not cache.register(1, b"a", 5)
    assert cache.register(1, b"a", 6)
    assert (cache.find(0, b"a"), cache.find(1, b"a"), cache.find(0, b"b")) == (5, 6, 0)
    cache.forget(5)
    cache.forget(5)
    assert (cache.find(0, b"a"), len(cache)) == (0, 1)
    cache.check_integrity()
    assert cache.clear() == [6]


def test_a_digest_names_the_whole_prefix_and_the_salt() -> None:
    def chain(tokens: list[int], salt: str = "", page: int = 2) -> list[bytes]:
        made = HashChain(salt)
        made.extend(np.array(tokens, np.int32), page)
        return made.digests

    assert chain([1, 2, 3, 4])[0] == chain([1, 2, 9, 9])[0]
    assert chain([1, 2, 3, 4])[1] != chain([9, 2, 3, 4])[1]
    assert chain([1, 2])[0] != chain([1, 2], "tenant")[0]
    assert chain([1, 2, 3]) == chain([1, 2]), "a page that is not full has no digest"
    piecewise = HashChain("s")
    piecewise.extend(np.array([1, 2], np.int64), 2)
    piecewise.extend(np.array([3, 4], np.int32), 2)
    assert piecewise.digests == chain([1, 2, 3, 4], "s")
    assert {len(digest) for digest in piecewise.digests} == {16}


def test_windows_in_columns() -> None:
    assert [first_column(None, 99, 4), first_column(5, 11, 4), first_column(5, 3, 4), first_column(1, 8, 4)] == [
        0,
        1,
        0,
        2,
    ]
    # full: 3 columns; window 5, one query at a time: positions p - 4 .. p touch at most 2 pages of 4
    assert span_columns(5, 1, 4) == 2
    assert peak_pages((None, 5), 4, 12, 1) == 3 + 2
    assert peak_pages((None, 5), 4, 12, None) == 3 + 3
    assert peak_pages((5,), 4, 1000, 8) == 4


@given(
    windows=st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=3).map(tuple),
    size=st.integers(1, 8),
    pages=st.integers(3, 60),
    chunk=st.none() | st.integers(1, 16),
)
def test_capacity_is_the_longest_sequence_whose_peak_fits(
    windows: tuple[int | None, ...], size: int, pages: int, chunk: int | None
) -> None:
    capacity = capacity_tokens(windows, size, pages, chunk)
    if capacity:
        assert peak_pages(windows, size, capacity, chunk) <= pages
    if capacity < 2**31 - 2:
        assert peak_pages(windows, size, capacity + 1, chunk) > pages


@given(window=st.integers(1, 20), size=st.integers(1, 8), chunk=st.integers(1, 16), start=st.integers(0, 100))
def test_a_span_never_touches_more_columns_than_counted(window: int, size: int, chunk: int, start: int) -> None:
    touched = (start + chunk - 1) // size - first_column(window, start, size) + 1
    assert touched <= span_columns(window, chunk, size)


def test_a_table_grows_and_keeps_its_entries() -> None:
    table = GroupTable(None)
    table.reserve(1, 2)
    table.put(0, 0, [7, 8])
    table.reserve(3, 5)
    assert table.pages.shape == (3, 5)
    assert table.pages[0].tolist() == [7, 8, 0, 0, 0]
    assert table.slide(0, 1) == [7]
    assert table.clear(0, 2) == [8]
    assert not table.pages.any()


def test_memory_becomes_pages() -> None:
    plan = plan_pages(
        page_bytes=1000, page_tokens=16, windows=(None,), max_model_len=160, max_num_seqs=100, memory=51_999
    )
    assert (plan.num_pages, plan.usable_pages, plan.kv_bytes) == (51, 50, 51_000)
    assert (plan.capacity_tokens, plan.max_concurrency, plan.warning) == (800, 5.0, None)
    few = plan_pages(page_bytes=1000, page_tokens=16, windows=(None,), max_model_len=160, max_num_seqs=2, memory=10**6)
    assert few.usable_pages == 20, "more than all rows can use is not taken"


def test_a_pool_smaller_than_the_context_warns_and_one_too_small_is_refused() -> None:
    sizes = {"page_bytes": 1000, "page_tokens": 16, "windows": (None,), "max_model_len": 512, "max_num_seqs": 4}
    small = plan_pages(**sizes, num_pages=20)  # type: ignore[arg-type]
    assert (small.usable_pages, small.capacity_tokens) == (20, 320)
    assert small.warning is not None
    assert "--max-model-len 320" in small.warning
    with pytest.raises(ConfigError, match="--num-kv-pages 1 gives 1 pages"):
        plan_pages(**sizes, num_pages=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        plan_pages(**sizes, memory=2500)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a size"):
        plan_pages(**sizes)  # type: ignore[arg-type]
