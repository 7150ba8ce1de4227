"""Layers are cut into groups of equally many, so that all groups draw pages from one id space."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hardpoint.models.grouping import MAX_GROUPS, Grouping, group_layers, part_of
from hardpoint_platforms.state_cache import LayerCache

PLAIN = LayerCache((("k", 2, 16), ("v", 2, 16)))
WIDE = LayerCache((("k", 2, 32), ("v", 2, 32)))


def _pattern(layers: int, every: int, window: int = 512) -> list[int | None]:
    return [None if (layer + 1) % every == 0 else window for layer in range(layers)]


def _group(windows: list[int | None]) -> Grouping:
    return group_layers(windows, [PLAIN] * len(windows))


def _full_layers(grouping: Grouping) -> int:
    return sum(len(group.layers) for group in grouping.groups if group.window is None)


def test_one_kind_of_layer_is_one_group() -> None:
    grouping = _group([None] * 30)
    assert [group.layers for group in grouping.groups] == [tuple(range(30))]
    assert grouping.pool == (PLAIN,) * 30
    assert grouping.place[7] == (0, 7)


def test_gemma3_270m() -> None:
    grouping = _group(_pattern(18, 6))
    assert [len(group.layers) for group in grouping.groups] == [3] * 6
    assert grouping.groups[0].layers == (5, 11, 17)
    assert grouping.groups[0].window is None
    assert [group.window for group in grouping.groups[1:]] == [512] * 5
    assert len(grouping.pool) == 3


def test_gemma2_alternates() -> None:
    grouping = _group(_pattern(26, 2))
    assert [group.window for group in grouping.groups] == [None, 512]
    assert grouping.groups[1].layers == tuple(range(0, 26, 2))


def test_counts_without_a_common_divisor_widen_some_sliding_layers() -> None:
    # Gemma 3 4B: 34 layers, 5 of them full; 34 groups of one layer would be too many page tables
    grouping = _group(_pattern(34, 6))
    assert [len(group.layers) for group in grouping.groups] == [17, 17]
    assert _full_layers(grouping) == 17


def test_layers_that_cache_other_things_share_one_group() -> None:
    windows = _pattern(6, 3)
    caches = [WIDE if window is None else PLAIN for window in windows]
    grouping = group_layers(windows, caches)
    assert len(grouping.groups) == 1
    assert grouping.groups[0].window is None
    for layer, (group, pool_layer) in enumerate(grouping.place):
        assert group == 0
        assert grouping.pool[pool_layer] == caches[layer]


@given(st.lists(st.sampled_from([None, 64, 512]), min_size=1, max_size=64))
def test_every_layer_has_one_place_and_its_window_fits(windows: list[int | None]) -> None:
    grouping = _group(windows)
    assert sorted(layer for group in grouping.groups for layer in group.layers) == list(range(len(windows)))
    assert len({len(group.layers) for group in grouping.groups}) == 1
    assert len(grouping.groups) <= MAX_GROUPS
    assert len(grouping.pool) == len(grouping.groups[0].layers)
    for layer, (group, pool_layer) in enumerate(grouping.place):
        assert grouping.groups[group].layers[pool_layer] == layer
        held = grouping.groups[group].window
        own = windows[layer]
        assert held is None or (own is not None and own <= held)


@given(st.lists(st.sampled_from([None, 16, 512]), min_size=1, max_size=24), st.data())
def test_a_part_keeps_the_groups_and_each_pool_layer_keeps_what_it_caches(
    windows: list[int | None], data: st.DataObject
) -> None:
    caches = [data.draw(st.sampled_from([PLAIN, WIDE])) for _ in windows]
    whole = group_layers(windows, caches)
    start = data.draw(st.integers(0, len(windows) - 1))
    layers = range(start, data.draw(st.integers(start + 1, len(windows))))
    part = part_of(whole, layers)
    assert [group.window for group in part.groups] == [group.window for group in whole.groups]
    assert sorted(layer for group in part.groups for layer in group.layers) == list(layers)
    for layer in layers:
        group, pool_layer = part.place[layer]
        assert layer in part.groups[group].layers
        assert part.pool[pool_layer] == caches[layer]
    assert len({part.place[layer] for layer in layers}) == len(layers)
