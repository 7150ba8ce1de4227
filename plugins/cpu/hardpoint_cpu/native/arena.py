"""Memory of a tape: one block in which each intermediate has a place while it is needed.

storage 0  |#####---------|        # in use, from the first entry that touches it to the last
storage 1  |--#######-----|
storage 2  |-----######---|   may take storage 0's place, but not storage 1's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass(frozen=True)
class Life:
    """Bytes that are needed from entry `first` to entry `last`, both included."""

    size: int
    first: int
    last: int


class _FreeList:
    """Gaps of the block, by address; the block grows at its end."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []  # (start, size), ascending, no two adjacent
        self.end = 0

    def take(self, size: int) -> int:
        fitting = [(gap, start) for start, gap in self._gaps if gap >= size]
        if fitting:
            gap, start = min(fitting)
            self._gaps.remove((start, gap))
            if gap > size:
                self.give(start + size, gap - size)
            return start
        start = self.end
        if self._gaps and sum(self._gaps[-1]) == self.end:
            start, _ = self._gaps.pop()
        self.end = start + size
        return start

    def give(self, start: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (start, size)]):
            if merged and sum(merged[-1]) == gap[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + gap[1])
            else:
                merged.append(gap)
        self._gaps = merged


def place(lives: Sequence[Life]) -> tuple[tuple[int, ...], int]:
    """(offset of each, bytes of the whole block). No two that are needed at once overlap."""
    offsets = [0] * len(lives)
    free = _FreeList()
    ends: dict[int, list[int]] = {}
    for index in sorted(range(len(lives)), key=lambda i: lives[i].first):
        life = lives[index]
        for last in sorted(moment for moment in ends if moment < life.first):
            for gone in ends.pop(last):
                free.give(offsets[gone], _rounded(lives[gone].size))
        offsets[index] = free.take(_rounded(life.size))
        ends.setdefault(life.last, []).append(index)
    return tuple(offsets), free.end


def _rounded(size: int) -> int:
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
