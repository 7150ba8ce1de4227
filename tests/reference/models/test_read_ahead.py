"""Weights are read once each, a little ahead, by other threads; what a load raises reaches whoever asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from hardpoint.models import read_ahead
from hardpoint.models.pieces import Pieces
from hardpoint.models.read_ahead import ReadAhead
from hardpoint_platforms.ops.contract import WeightSpec

pytestmark = pytest.mark.reference


class Shelf:
    """Numbered weights that note who read them."""

    def __init__(self, count: int) -> None:
        self.read: list[int] = []
        self.threads: set[int] = set()
        self.loads: list[Callable[[], torch.Tensor]] = [self._load(number) for number in range(count)]

    def _load(self, number: int) -> Callable[[], torch.Tensor]:
        def load() -> torch.Tensor:
            self.read.append(number)
            self.threads.add(threading.get_ident())
            return torch.full((2,), float(number))

        return load


def test_each_is_read_once_elsewhere_and_in_any_order() -> None:
    shelf = Shelf(20)
    with ReadAhead([*((load, 10) for load in shelf.loads), (shelf.loads[3], 10)], join=True) as read:
        for number in (1, 0, *range(19, 1, -1)):
            assert read(shelf.loads[number]).tolist() == [number, number]
    assert sorted(shelf.read) == list(range(20))
    assert threading.get_ident() not in shelf.threads


def test_it_reads_no_further_ahead_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_AHEAD", 25)
    shelf = Shelf(20)
    with ReadAhead(((load, 10) for load in shelf.loads), join=True) as read:
        for number, load in enumerate(shelf.loads):
            read(load)
            time.sleep(0.002)
            assert max(shelf.read) <= number + 3


def test_a_failing_load_fails_for_who_asks() -> None:
    def broken() -> torch.Tensor:
        raise ValueError("torn page")

    shelf = Shelf(2)
    with ReadAhead([(shelf.loads[0], 1), (broken, 1), (shelf.loads[1], 1)], join=True) as read:
        assert read(shelf.loads[0]).tolist() == [0.0, 0.0]
        with pytest.raises(ValueError, match="torn page"):
            read(broken)
        assert read(shelf.loads[1]).tolist() == [1.0, 1.0]
        with pytest.raises(KeyError):
            read(shelf.loads[1])


@pytest.mark.parametrize("join", [True, False])
def test_pieces_are_joined_by_the_readers_or_left_to_who_moves_them(join: bool) -> None:
    halves = [torch.zeros(1, 3), torch.ones(2, 3)]

    def load() -> Pieces:
        return Pieces(WeightSpec((3, 3), torch.float32), halves, torch.cat, 0)

    with ReadAhead([(load, 9)], join=join) as read:
        got = read(load)
    assert isinstance(got, torch.Tensor) == join
    whole = got if isinstance(got, torch.Tensor) else got.join()
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, torch.cat(halves))
