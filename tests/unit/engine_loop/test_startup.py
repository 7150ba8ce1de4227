"""Around the start of a process: the collector rests, and what is left over goes back to the system."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest

from hardpoint.engine.startup import lasting_objects
from hardpoint_platforms.host_memory import give_back_memory


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_inside_and_all_is_kept_after() -> None:
    with lasting_objects():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)


def test_an_error_inside_leaves_the_collector_on() -> None:
    with pytest.raises(KeyError), lasting_objects():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with lasting_objects():
        pass
    assert not gc.isenabled()


def test_memory_is_given_back_where_the_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Library:
        def malloc_trim(self, pad: ctypes.c_size_t) -> int:
            asked.append(pad.value)
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    give_back_memory()
    assert asked == [0]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    give_back_memory()
