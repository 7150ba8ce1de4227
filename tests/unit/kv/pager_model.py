"""A model of what the pages hold, driven beside a real pager: every operation is checked against it.

Each slot keeps a hash over the whole prefix that ends there, so that a page shared or given away wrongly is seen as
soon as somebody reads it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import numpy as np

from hardpoint.kv.groups import Windows, columns_of, first_column
from hardpoint.kv.pager import KVPager, Match
from hardpoint.kv.prefix_cache import HashChain


class Held:
    """A sequence: its tokens, how many are computed, a hash per prefix, and the request's hash chain."""

    def __init__(self, tokens: Sequence[int], salt: str) -> None:
        self.salt, self.computed, self.chain = salt, 0, HashChain(salt)
        self.tokens: list[int] = []
        self.prefixes: list[int] = []
        self.grow(tokens)

    def grow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            before = self.prefixes[-1] if self.prefixes else zlib.crc32(self.salt.encode())
            self.prefixes.append(hash((before, token)))
            self.tokens.append(token)


class PagerModel:
    """Rows 0 .. 3 of one pager."""

    def __init__(self, windows: Windows, page_tokens: int, num_pages: int, prefix_caching: bool) -> None:
        self.pager = KVPager(num_pages, page_tokens, windows, prefix_caching)
        self.slots = np.zeros((num_pages, page_tokens), np.int64)
        self.rows: dict[int, Held] = {}

    def digests(self, sequence: Held, count: int) -> Sequence[bytes]:
        size = self.pager.page_tokens
        have = len(sequence.chain.digests)
        if have < count:
            sequence.chain.extend(np.array(sequence.tokens[have * size : count * size], np.int32), size)
        return sequence.chain.digests

    def start(self, row: int, tokens: list[int], salt: str = "") -> int:
        """Open a row with what is cached; the tokens found."""
        sequence = Held(tokens, salt)
        match = self.pager.match(lambda count: self.digests(sequence, count), len(tokens))
        assert match.tokens == self._longest(sequence) * self.pager.page_tokens
        self.pager.open(row, match)
        return self._entered(row, sequence, match)

    def fork(self, parent: int, child: int) -> int:
        """Open a row with the tokens and pages of another; the tokens shared."""
        source = self.rows[parent]
        tokens = source.tokens[: source.computed]
        sequence = Held(tokens, source.salt)
        match = self.pager.shared_with(parent, len(tokens))
        assert self.pager.fork(parent, child, len(tokens)) == match.tokens
        return self._entered(child, sequence, match)

    def _entered(self, row: int, sequence: Held, match: Match) -> int:
        assert match.tokens % self.pager.page_tokens == 0
        assert match.tokens < len(sequence.tokens)
        sequence.computed = match.tokens
        self.rows[row] = sequence
        self.read(row, match.tokens)
        return match.tokens

    def _longest(self, sequence: Held) -> int:
        """Columns of the longest usable cached prefix, by trying all."""
        pager, size = self.pager, self.pager.page_tokens
        if not pager.prefix_caching:
            return 0
        limit = (len(sequence.tokens) - 1) // size
        names = self.digests(sequence, limit)
        for columns in range(limit, 0, -1):
            if all(
                pager._cache.find(g, names[column])
                for g, window in enumerate(pager.windows)
                for column in range(first_column(window, columns * size, size), columns)
            ):
                return columns
        return 0

    def compute(self, row: int, count: int) -> bool:
        """Compute up to `count` more tokens. False if pages are lacking."""
        sequence, pager, size = self.rows[row], self.pager, self.pager.page_tokens
        start, end = sequence.computed, min(sequence.computed + count, len(sequence.tokens))
        new = max(0, columns_of(end, size) - int(pager.columns[row])) * len(pager.windows)
        fits, room = new <= pager.available_pages, pager.room(row)
        assert fits == (end <= room)
        assert pager.extend(row, end) is fits
        if not fits:
            return False
        positions = np.arange(start, end)
        tables = pager.snapshot(np.array([row], np.int32))
        for group, table in enumerate(tables):
            pages = table[0, positions // size]
            self.slots[pages, positions % size] = np.array(sequence.prefixes[start:end], np.int64) ^ group
        self.read(row, start)
        sequence.computed = end
        pager.register(row, lambda count: self.digests(sequence, count), end)
        pager.slide(np.array([row], np.int32), np.array([end], np.int32))
        self.read(row, end)
        return True

    def read(self, row: int, query: int) -> None:
        """Check all that queries from position `query` on can see."""
        sequence, size = self.rows[row], self.pager.page_tokens
        tables = self.pager.snapshot(np.array([row], np.int32))
        for group, (table, window) in enumerate(zip(tables, self.pager.windows, strict=True)):
            first = 0 if window is None else max(0, query - window + 1)
            positions = np.arange(first, sequence.computed)
            pages = table[0, positions // size]
            expected = np.array(sequence.prefixes[first : sequence.computed], np.int64) ^ group
            assert (self.slots[pages, positions % size] == expected).all()

    def end(self, row: int, forget: bool = False) -> None:
        """Close a row."""
        before = self.pager.available_pages
        freed = self.pager.exclusive_pages(row)
        self.pager.close(row, forget)
        assert self.pager.available_pages == before + freed
        del self.rows[row]

    def check(self) -> None:
        """The pager's own invariants, and the sums."""
        pager = self.pager
        pager.check_integrity()
        assert pager.used_pages + pager.free_pages + pager.cached_pages == pager.usable_pages
        for row, sequence in self.rows.items():
            slack = int(pager.columns[row]) * pager.page_tokens - sequence.computed
            assert 0 <= slack < pager.page_tokens, "waste of a page or more"


def random_run(seed: int, operations: int = 11) -> int:
    """Random operations on a random pager; the number of tokens found in the cache."""
    rng = random.Random(seed)
    windows: Windows = rng.choice([(None,), (None,), (None, 5), (3,), (None, 2, 6), (None, None)])
    model = PagerModel(windows, rng.choice([1, 2, 4]), rng.choice([8, 14, 30, 60]), rng.random() < 0.8)
    stems = [[rng.randrange(3) for _ in range(20)] for _ in range(2)]
    found = 0
    for _ in range(operations):
        kind, row = rng.random(), rng.randrange(4)
        if row not in model.rows:
            parents = [other for other, sequence in model.rows.items() if sequence.computed]
            if parents and kind < 0.3:
                model.fork(rng.choice(parents), row)
            else:
                tokens = rng.choice(stems)[: rng.randint(1, 20)] + [rng.randrange(3) for _ in range(rng.randint(0, 2))]
                found += model.start(row, tokens, rng.choice(["", "", "", "s"]))
        elif kind < 0.55:
            model.compute(row, rng.choice([1, 3, 8, 20]))
        elif kind < 0.7:
            model.rows[row].grow([rng.randrange(3)])
            model.compute(row, 30)
        elif kind < 0.98:
            model.end(row, forget=kind > 0.95)
        else:
            model.pager.reset_prefix_cache()
        model.check()
    for row in list(model.rows):
        model.end(row)
    model.check()
    assert model.pager.used_pages == 0
    return found
