"""Rows that share pages: which groups are found, and how their keys are cut, against brute force."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hardpoint_torch_gpu import plan as plans
from hardpoint_torch_gpu import sharing
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner, cut
from hardpoint_torch_gpu.rule import ScoreRule
from hardpoint_torch_gpu.sharing import Groups, HostSharing, best_groups, cut_tiles, find, most_units, tile_for
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_rows import SharedRows

pytestmark = pytest.mark.reference
PAGE = 4


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "WORTH", 0)


def best_by_hand(table: np.ndarray, rows: list[int], whole: np.ndarray, depth: int, tile: int) -> int:
    """Reads of pages that rows with `depth` equal pages can save at most."""
    if len(rows) < 2:
        return 0
    parts = defaultdict(list)
    for row in rows:
        if whole[row] > depth and table[row, depth] > 0:
            parts[table[row, depth]].append(row)
    apart = sum(best_by_hand(table, part, whole, depth + 1, tile) for part in parts.values())
    return max(apart, depth * (len(rows) - -(-len(rows) // tile)))


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    rows, width = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    pages = st.lists(st.integers(0, 2), min_size=width, max_size=width)
    table = np.array([draw(pages) for _ in range(rows)], np.int32)
    return table, np.array([draw(st.integers(0, width)) for _ in range(rows)])


@settings(deadline=None)
@given(tables(), st.sampled_from([2, 4, 16]))
def test_groups_save_most_and_share_what_they_say(given_: tuple[np.ndarray, np.ndarray], tile: int) -> None:
    table, whole = given_
    wanted = best_by_hand(table, [*range(len(table))], whole, 0, tile)
    found = find(table, np.arange(len(table)), whole, tile, 1)
    if found is None:
        assert wanted == 0
        return
    assert len({*found.rows.tolist()}) == len(found.rows) == found.sizes.sum()
    saved = at = 0
    for size, pages in zip(found.sizes.tolist(), found.pages.tolist(), strict=True):
        rows = found.rows[at : at + size]
        assert size > 1
        assert (table[rows, :pages] == table[rows[0], :pages]).all()
        assert (table[rows, :pages] > 0).all()
        assert 0 < pages <= whole[rows].min()
        saved += pages * (size - -(-size // tile))
        at += size
    assert saved == wanted
    assert find(table, np.arange(len(table)), whole, tile, wanted + 1) is None


def test_rows_are_those_of_the_table() -> None:
    table = np.array([[9, 1], [5, 2], [9, 3], [5, 4]], np.int32)
    found = find(table, np.array([1, 3]), np.array([1, 1]), 16, 1)
    assert found is not None
    assert (sorted(found.rows.tolist()), found.sizes.tolist(), found.pages.tolist()) == ([1, 3], [2], [1])


def test_a_header_that_all_share_does_not_hide_longer_prefixes() -> None:
    assert best_groups(np.array([100, 1, 80, 80]), 16) == [(0, 2, 100), (2, 3, 80)]
    assert best_groups(np.array([3, 1, 3]), 16) == [(0, 2, 3), (2, 2, 3)]
    assert best_groups(np.array([3, 2, 3]), 16) == [(0, 4, 2)]
    assert best_groups(np.array([0, 0]), 16) == []


def test_a_chain_of_prefixes_takes_no_deep_recursion() -> None:
    (found,) = best_groups(np.arange(1, 3000), 2)
    assert found[1] > 1000


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 60), st.integers(1, 900)), min_size=1, max_size=9),
    st.sampled_from([2, 8, 64]),
    st.booleans(),
)
def test_units_hold_every_key_of_every_member_once(groups: list[tuple[int, int]], tile: int, fixed: bool) -> None:
    sizes, pages = (np.array(each) for each in zip(*groups, strict=True))
    total = int(sizes.sum())
    rows = np.random.default_rng(1).permutation(total + 5)[:total]
    made = cut_tiles(Groups(rows, sizes, pages), total + 5, PAGE, tile, fixed=fixed)
    assert len(made.units) == most_units(total + 5) if fixed else (made.units[:, 0] > 0).all()
    slots = dict[int, tuple[int, int, int]]()
    for count, place, start, stop, slot in made.units[made.units[:, 0] > 0].tolist():
        assert 0 < count <= tile
        assert start % sharing.STEP == 0
        for member in range(count):
            assert slots.setdefault(slot + member, (row := int(made.members[place + member]), start, stop))[0] == row
    assert len(slots) == (made.units[:, 0] * (made.units[:, 0] > 0)).sum()
    assert max(slots) < len(made.members) + sharing.MORE_UNITS * tile
    wanted = dict(zip(rows.tolist(), np.repeat(pages * PAGE, sizes).tolist(), strict=True))
    for row, (keys, slot, apart, pieces) in enumerate(made.own.tolist()):
        assert keys == wanted.get(row, 0)
        at = 0
        for piece in range(pieces):
            owner, start, stop = slots.pop(slot + piece * apart)
            assert (owner, start) == (row, at)
            at = stop
        assert at == keys
    assert not slots
    assert made.saved == sum(PAGE * p * (n - -(-n // tile)) for n, p in groups)


def test_few_units_where_there_are_many_tiles_and_many_where_there_are_few() -> None:
    def units(rows: int, keys: int) -> int:
        groups = Groups(np.arange(rows), np.array([rows]), np.array([keys // PAGE]))
        return len(cut_tiles(groups, rows, PAGE, 16, fixed=False).units)

    assert units(256, 2048) == 32
    assert units(512, 8192) <= 64
    assert units(2, 64) == 1
    assert units(16, 8192) == 32


@pytest.mark.parametrize(("heads", "members"), [(1, 64), (4, 16), (7, 8), (8, 8), (32, 2), (71, 2)])
def test_a_tile_is_what_tensor_cores_take(heads: int, members: int) -> None:
    assert tile_for(heads) == members


def planned(rows: SharedRows, *shares: tuple[int, int, int]) -> GpuPlan:
    planner = GpuPlanner(lambda tensors: tuple(tensors))
    for share in shares or ((0, 4, 256),):
        planner.share(*share)
    return planner.plan(rows.batch())


ROWS = SharedRows(((3, (1, 6, 2)), (0, (9,)), (5, (3, 3))), extra=2)


def test_a_decode_step_has_fixed_sizes_whatever_it_shares() -> None:
    for rows in (ROWS, SharedRows(((9, (1,) * 6),), extra=2), SharedRows(((2, (5, 1)), (3, (1, 1, 1, 1))), extra=2)):
        plan = planned(rows)
        (found,) = plan.sharing
        assert found is not None
        assert [tuple(x.shape) for x in (found.own, found.parts, found.units, found.members)] == [
            (8, 4), (80, 4), (37, 5), (8,),
        ]  # fmt: skip
        room = plan.with_room().sharing[0]
        assert room is not None
        assert all(
            mine.shape == theirs.shape
            for mine, theirs in zip(vars(found).values(), vars(room).values(), strict=True)
            if isinstance(mine, torch.Tensor)
        )
        assert torch.equal(plan.parts, torch.from_numpy(cut(*[np.arange(8)] * 2, plan.lengths.numpy(), fixed=True)))


def test_parts_are_of_what_rows_do_not_share() -> None:
    plan = planned(ROWS)
    (found,) = plan.sharing
    assert found is not None
    keys = np.zeros(8, int)
    for row, token, number, share in found.parts[found.parts[:, 0] >= 0].tolist():
        assert token == row
        own = int(plan.lengths[row]) - int(found.own[row, 0])
        keys[row] += max(min(own - number * share, share), 0)
    assert sorted(keys.tolist()) == [0, 0, 1, 2, 3, 3, 6, 9]
    assert found.saved == 2 * 3 * PAGE + 5 * PAGE


def test_only_rows_of_one_token_share_in_a_mixed_step() -> None:
    plan = planned(replace(ROWS, prompts=(7, 9)))
    (found,) = plan.sharing
    assert found is not None
    assert plan.padded
    assert len(plan.tile_rows) == 2
    assert sorted(found.members.tolist()) == sorted(np.flatnonzero(found.own[:, 0].numpy()).tolist())
    assert len(found.members) == 5


def test_nothing_is_shared_where_no_layer_can_or_it_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = GpuPlanner(lambda tensors: tuple(tensors))
    assert planner.plan(ROWS.batch()).sharing == planner.plan(ROWS.batch()).sharers == ()
    assert planned(SharedRows(((0, (5, 9)),))).sharing == ()
    monkeypatch.setattr(plans, "WORTH", 44 * 256)
    assert planned(ROWS).sharing != ()
    monkeypatch.setattr(plans, "WORTH", 45 * 256)
    assert planned(ROWS).sharing == ()
    assert planned(ROWS).sharers == (16,)


def test_windows_and_alibi_read_for_themselves() -> None:
    plan = planned(ROWS)
    assert plan.shared(0, ScoreRule(1.0, None, 5.0, None)) is plan.sharing[0] is not None
    assert plan.shared(0, ScoreRule(1.0, 7, None, None)) is None
    assert plan.shared(0, ScoreRule(1.0, None, None, (0.5,))) is None


def test_groups_of_pages_are_told_apart() -> None:
    """Another cache group has pages of its own; in a recorded step each that may share has its tensors."""
    planner = GpuPlanner(lambda tensors: tuple(tensors))
    planner.share(1, 4, 256)
    planner.share(1, 8, 128)
    planner.share(2, 1, 256)
    first, second = ROWS.batch(), SharedRows(((0, (1, 6, 2, 9, 3, 3)),), extra=2).batch()
    batch = replace(
        first, page_tables=(first.page_tables[0], first.page_tables[0], second.page_tables[0]),
        slot_mapping=first.slot_mapping * 3,
    )  # fmt: skip
    plan = planner.plan(batch)
    none, found, empty = plan.sharing
    assert plan.sharers == (0, 8, 64)
    assert none is None
    assert found is not None
    assert found.tile == 8
    assert empty is not None
    assert not empty.own.any()
    assert not empty.units.any()
    assert torch.equal(empty.parts, plan.parts)


def test_no_tiles_are_nothing() -> None:
    made = sharing.no_tiles(6)
    assert isinstance(made, HostSharing)
    assert not made.own.any()
    assert made.saved == 0
