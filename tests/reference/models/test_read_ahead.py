"""Weights are read once each, a little ahead, by other threads; what a load raises reaches whoever asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from hardpoint.models import read_ahead
from hardpoint.models.read_ahead import ReadAhead

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
    with ReadAhead([*((load, 10) for load in shelf.loads), (shelf.loads[3], 10)]) as read:
        for number in (1, 0, *range(19, 1, -1)):
            assert read(shelf.loads[number]).tolist() == [number, number]
    assert sorted(shelf.read) == list(range(20))
    assert threading.get_ident() not in shelf.threads


def test_it_reads_no_further_ahead_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_AHEAD", 25)
    shelf = Shelf(20)
    with ReadAhead((load, 10) for load in shelf.loads) as read:
        for number, load in enumerate(shelf.loads):
            read(load)
            time.sleep(0.002)
            assert max(shelf.read) <= number + 3


def test_a_failing_load_fails_for_who_asks() -> None:
    def broken() -> torch.Tensor:
        raise ValueError("torn page")

    shelf = Shelf(2)
    with ReadAhead([(shelf.loads[0], 1), (broken, 1), (shelf.loads[1], 1)]) as read:
        assert read(shelf.loads[0]).tolist() == [0.0, 0.0]
        with pytest.raises(ValueError, match="torn page"):
            read(broken)
        assert read(shelf.loads[1]).tolist() == [1.0, 1.0]
        with pytest.raises(KeyError):
            read(shelf.loads[1])
