"""The pager in small cases, and the damage that `check_integrity` must see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hardpoint.errors import ConfigError, EngineError
from hardpoint.kv.pager import KVPager
from hardpoint.kv.prefix_cache import HashChain


def digests(tokens: Sequence[int], size: int, salt: str = "") -> Callable[[int], list[bytes]]:
    chain = HashChain(salt)
    chain.extend(np.array(tokens, np.int32), size)
    return lambda count: chain.digests


def filled(pager: KVPager, row: int, tokens: Sequence[int]) -> None:
    """A row with these tokens computed and cached."""
    pager.open(row, pager.match(digests(tokens, pager.page_tokens), len(tokens)))
    assert pager.extend(row, len(tokens))
    pager.register(row, digests(tokens, pager.page_tokens), len(tokens))
    pager.slide(np.array([row], np.int32), np.array([len(tokens)], np.int32))
    pager.check_integrity()


def test_pages_come_column_by_column_all_or_nothing() -> None:
    pager = KVPager(6, 4, (None,), True)
    pager.open(0)
    assert pager.extend(0, 9)
    assert (pager.used_pages, pager.available_pages, pager.columns[0]) == (3, 2, 3)
    assert pager.extend(0, 12)
    assert not pager.extend(0, 21)
    assert (pager.used_pages, pager.room(0)) == (3, 20)
    assert pager.short(np.array([0], np.int32), np.array([13], np.int32)).tolist() == [0]
    assert pager.short(np.array([0], np.int32), np.array([12], np.int32)).tolist() == []
    pager.close(0)
    assert pager.available_pages == 5


def test_a_match_stops_before_the_last_token() -> None:
    pager = KVPager(10, 4, (None,), True)
    filled(pager, 0, range(12))
    assert pager.match(digests(range(12), 4), 12).tokens == 8
    assert pager.match(digests(range(13), 4), 13).tokens == 12
    assert pager.match(digests([0, 1, 2, 3, 9, 9, 9, 9, 9], 4), 9).tokens == 4
    assert pager.match(digests(range(12), 4, "salt"), 12).tokens == 0
    assert KVPager(10, 4, (None,), False).match(digests(range(12), 4), 12).tokens == 0


def test_a_cached_chain_loses_its_end_first() -> None:
    pager = KVPager(5, 4, (None,), True)
    filled(pager, 0, range(16))
    pager.close(0)
    assert (pager.cached_pages, pager.free_pages, pager.available_pages) == (4, 0, 4)
    pager.open(1)
    pager.extend(1, 4)
    assert pager.match(digests(range(17), 4), 17).tokens == 12
    pager.extend(1, 8)
    assert pager.match(digests(range(17), 4), 17).tokens == 8
    pager.check_integrity()


def test_a_used_prefix_outlives_an_older_unused_one() -> None:
    pager = KVPager(5, 4, (None,), True)
    filled(pager, 0, [1] * 8)
    pager.close(0)
    filled(pager, 0, [2] * 8)
    pager.close(0)
    filled(pager, 0, [1] * 8)  # uses the first page of the older one again
    pager.close(0)
    pager.open(1)
    pager.extend(1, 8)
    assert pager.match(digests([1] * 9, 4), 9).tokens > 0
    assert pager.match(digests([2] * 9, 4), 9).tokens == 0


def test_a_fork_shares_full_pages_by_reference_without_a_cache() -> None:
    pager = KVPager(10, 4, (None,), False)
    pager.open(0)
    pager.extend(0, 10)
    assert pager.fork(0, 1, 10) == 8
    assert pager.fork(0, 2, 8) == 4, "one token is left to compute"
    pager.check_integrity()
    table = pager.snapshot(np.array([0, 1, 2], np.int32))[0]
    assert table[1].tolist() == [*table[0, :2], 0]
    assert pager.used_pages == 3
    assert pager.exclusive_pages(0) == 1
    pager.close(0)
    assert pager.used_pages == 2
    pager.check_integrity()


def test_a_fork_of_a_sliding_group_needs_the_window_still_held() -> None:
    pager = KVPager(20, 4, (None, 6), False)
    filled(pager, 0, range(20))
    # the sliding group holds columns 3 and 4 (query 20 reads 15 .. 20); at column c it must hold from 4c - 5 on
    assert pager.fork(0, 1, 20) == 0
    assert pager.fork(0, 2, 21) == 20


def test_groups_draw_from_one_pool_and_slide_apart() -> None:
    pager = KVPager(20, 4, (None, 5), True)
    pager.open(0)
    pager.extend(0, 12)
    assert pager.used_pages == 6
    pager.slide(np.array([0], np.int32), np.array([12], np.int32))
    full, sliding = pager.snapshot(np.array([0], np.int32))
    assert full.all()
    assert (sliding > 0).tolist() == [[False, False, True]]  # query 12 reads 8 .. 12
    assert pager.used_pages == 4
    pager.check_integrity()


def test_pages_of_bad_values_leave_the_cache_even_while_shared() -> None:
    pager = KVPager(20, 4, (None,), True)
    filled(pager, 0, range(9))
    filled(pager, 1, range(9))
    pager.close(0, forget=True)
    pager.check_integrity()
    assert pager.match(digests(range(9), 4), 9).tokens == 0


def test_reset_frees_what_nobody_uses_and_stops_sharing_the_rest() -> None:
    pager = KVPager(20, 4, (None,), True)
    filled(pager, 0, range(9))
    filled(pager, 1, range(50, 59))
    pager.close(1)
    assert pager.reset_prefix_cache() == 2
    assert (pager.cached_pages, pager.used_pages) == (0, 3)
    pager.extend(0, 16)
    pager.register(0, digests(range(16), 4), 16)
    assert pager.match(digests(range(17), 4), 17).tokens == 0
    pager.check_integrity()


def test_sizes_that_make_no_sense() -> None:
    for arguments in ((1, 4, (None,)), (2, 4, (None, 3)), (9, 0, (None,)), (9, 4, ()), (9, 4, (0,))):
        with pytest.raises(ConfigError):
            KVPager(*arguments, prefix_caching=True)
    pager = KVPager(9, 4, (None,), True)
    pager.open(0)
    with pytest.raises(EngineError, match="open already"):
        pager.open(0)


def _twice(pager: KVPager) -> None:
    pager._groups[0].pages[1, 0] = pager._groups[0].pages[0, 0]


def _gap(pager: KVPager) -> None:
    pager._groups[0].pages[0, 1] = 0


def _beyond(pager: KVPager) -> None:
    pager._groups[0].pages[2, 0] = 5


def _count(pager: KVPager) -> None:
    pager._pool.references[int(pager._groups[0].pages[0, 0])] += 1


def _moved(pager: KVPager) -> None:
    row = pager._groups[0].pages[0]
    row[0], row[1] = row[1], row[0]


def _closed(pager: KVPager) -> None:
    pager._open.remove(0)


def _misnamed(pager: KVPager) -> None:
    pager._cache._names[int(pager._groups[0].pages[0, 0])] = (0, b"other")


@pytest.mark.parametrize("damage", [_twice, _gap, _beyond, _count, _closed, _misnamed])
def test_damage_is_seen(damage: Callable[[KVPager], None]) -> None:
    pager = KVPager(12, 4, (None,), True)
    for row in (2, 1, 0):
        pager.open(row)
    pager.extend(0, 8)
    pager.extend(1, 4)
    pager.register(0, digests(range(8), 4), 8)
    pager.check_integrity()
    damage(pager)
    with pytest.raises(EngineError):
        pager.check_integrity()


def test_a_shared_page_in_two_columns_is_seen() -> None:
    pager = KVPager(12, 4, (None,), True)
    filled(pager, 0, range(9))
    filled(pager, 1, range(9))
    _moved(pager)
    with pytest.raises(EngineError, match="two columns"):
        pager.check_integrity()
