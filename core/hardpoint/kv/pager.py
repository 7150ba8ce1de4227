"""The KV pager: which pages each running sequence has, which it shares, and which prefixes are cached.

A sequence lives in a row. All groups of layers grow together, column by column, out of one pool:

                 shared with others      own, full           own, filling
    row 3      | c0 | c1 | c2 |        | c3 | c4 | c5 |     | c6 |              page_tokens tokens per column
    group 0      17   18   19            40   42   44         50        full: every column from 0 on
    group 1       0    0   23            41   43   45         51        sliding: entries before starts[3] = 2 are 0
               [0, shared)             [shared, columns)
               [0, registered): digests are in the cache (or another page with the same prefix is)

    extend(row, t)    columns = ceil(t / page_tokens); takes (new columns) x (groups) pages
    slide(...)        frees the columns of sliding groups that no later query reads
    close(row)        drops all, last column first, so that a cached chain loses its end first

Only full pages are shared, so that nobody ever writes to a page that another reads: no copy on write. Ints and numpy
only; page contents are the worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hardpoint.errors import ConfigError, EngineError
from hardpoint.kv.block_pool import BlockPool
from hardpoint.kv.groups import GroupTable, Int32s, Windows, columns_of, first_column, span_columns
from hardpoint.kv.prefix_cache import PrefixCache

#: Asks a sequence for the digests of at least its first `count` pages.
Digests = Callable[[int], Sequence[bytes]]

#: Digests asked for at a time while matching, so that a miss at the start costs little.
_STRIDE = 32
#: `registered` of rows whose pages are to be cached no more.
_NEVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Match:
    """Pages that a sequence may start with.

    Attributes:
        tokens: tokens they hold; a multiple of the page size.
        columns: tokens in pages.
        pages: per group, `columns` page ids; 0 where a sliding group needs none.
        idle: how many of them nobody uses now.
        registered: columns of these that are in the prefix cache.
    """

    tokens: int = 0
    columns: int = 0
    pages: tuple[tuple[int, ...], ...] = ()
    idle: int = 0
    registered: int = 0


class KVPager:
    """Owns every page of the KV cache.

    num_pages: page ids, page 0 among them. windows: per group, tokens a query looks back (itself included), None for
    all. Raises ConfigError for sizes that cannot be.

    Attributes:
        columns: int32 [rows], columns each row has; all groups alike.
        queries, hits: prompt tokens looked up and found in the prefix cache, since the start.
    """

    def __init__(self, num_pages: int, page_tokens: int, windows: Windows, prefix_caching: bool) -> None:
        if page_tokens < 1 or not windows or any(w is not None and w < 1 for w in windows):
            raise ConfigError(f"page size {page_tokens} or windows {windows} make no sense; check --page-tokens")
        if num_pages < 1 + len(windows):
            raise ConfigError(
                f"{num_pages} KV pages cannot hold one page per group ({len(windows)}) and page 0; raise --num-kv-pages"
            )
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.windows = windows
        self.prefix_caching = prefix_caching
        self.queries = 0
        self.hits = 0
        self.columns: Int32s = np.zeros(0, np.int32)
        self._groups = [GroupTable(window) for window in windows]
        self._sliding = [g for g, window in enumerate(windows) if window is not None]
        self._cache = PrefixCache(len(windows))
        self._pool = BlockPool(num_pages, self._cache)
        self._open: set[int] = set()
        self._shared: Int32s = np.zeros(0, np.int32)
        self._registered: Int32s = np.zeros(0, np.int32)

    @property
    def usable_pages(self) -> int:
        """All pages but page 0."""
        return self.num_pages - 1

    @property
    def available_pages(self) -> int:
        """Pages that can be taken now: free ones, and cached ones that nobody uses."""
        return self._pool.available

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold."""
        return self.usable_pages - self._pool.available

    @property
    def cached_pages(self) -> int:
        """Pages that hold a cached prefix and that nobody uses."""
        return self._pool.idle

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self._pool.free

    # Finding what can be shared

    def match(self, digests: Digests, tokens: int) -> Match:
        """The longest cached prefix of a sequence of `tokens` tokens, short of its last token.

        A full group must have every page of it; a sliding group only those that the next query reads.
        """
        limit = (tokens - 1) // self.page_tokens
        if not self.prefix_caching or limit <= 0 or not len(self._cache):
            return Match()
        columns = limit
        found: list[Sequence[int]] = [()] * len(self.windows)
        for g, window in enumerate(self.windows):
            if window is None:
                found[g] = self._walk(g, digests, columns)
                columns = len(found[g])
        if columns and self._sliding:
            names = digests(columns)
            for g in self._sliding:
                found[g] = [self._cache.find(g, name) for name in names[:columns]]
            columns = self._reachable(found, columns)
        return self._matched(found, columns, columns)

    def shared_with(self, parent: int, tokens: int) -> Match:
        """What a sequence that begins with the first `tokens` tokens of row `parent` can share, short of the last."""
        columns = min((tokens - 1) // self.page_tokens, int(self.columns[parent]))
        if parent not in self._open or columns <= 0:
            return Match()
        found: list[Sequence[int]] = [group.pages[parent, :columns].tolist() for group in self._groups]
        return self._matched(found, self._reachable(found, columns), int(self._registered[parent]))

    def _walk(self, group: int, digests: Digests, limit: int) -> list[int]:
        pages: list[int] = []
        names: Sequence[bytes] = ()
        find = self._cache.find
        for column in range(limit):
            if column >= len(names):
                names = digests(min(limit, column + _STRIDE))
            page = find(group, names[column])
            if not page:
                break
            pages.append(page)
        return pages

    def _reachable(self, found: Sequence[Sequence[int]], limit: int) -> int:
        """Most columns, up to `limit`, whose window is complete in each sliding group."""
        runs: list[tuple[int, list[int]]] = []
        for g in self._sliding:
            run, lengths = 0, [0]
            for page in found[g][:limit]:
                run = run + 1 if page else 0
                lengths.append(run)
            runs.append((self.windows[g] or 0, lengths))
        for columns in range(limit, 0, -1):
            position = columns * self.page_tokens
            if all(r[columns] >= columns - first_column(w, position, self.page_tokens) for w, r in runs):
                return columns
        return 0

    def _matched(self, found: Sequence[Sequence[int]], columns: int, registered: int) -> Match:
        if not columns:
            return Match()
        pages = []
        for window, ids in zip(self.windows, found, strict=True):
            first = first_column(window, columns * self.page_tokens, self.page_tokens)
            pages.append((0,) * first + tuple(ids[first:columns]))
        idle = sum(self._pool.idle_among(ids) for ids in pages)
        if registered < _NEVER:
            registered = min(registered, columns)
        return Match(columns * self.page_tokens, columns, tuple(pages), idle, registered)

    # The life of a row

    def open(self, row: int, match: Match | None = None) -> None:
        """Start a sequence in a row, with the pages of a match made in the same breath."""
        if row in self._open:
            raise EngineError(f"pager: row {row} is open already")
        match = match or Match()
        self._reserve(row + 1, match.columns)
        self._open.add(row)
        for g, pages in enumerate(match.pages):
            self._pool.hold(pages)
            self._groups[g].put(row, 0, pages)
            self._groups[g].starts[row] = first_column(self.windows[g], match.tokens, self.page_tokens)
        self.columns[row] = self._shared[row] = match.columns
        self._registered[row] = match.registered

    def fork(self, parent: int, child: int, tokens: int) -> int:
        """Start row `child` with the full pages of the first `tokens` tokens of row `parent`; returns tokens shared.

        At least the last of the tokens is left to compute. Works without prefix caching.
        """
        match = self.shared_with(parent, tokens)
        self.open(child, match)
        return match.tokens

    def extend(self, row: int, tokens: int) -> bool:
        """Give a row pages for `tokens` tokens in all; all or nothing. False if there are too few pages."""
        have = int(self.columns[row])
        new = columns_of(tokens, self.page_tokens) - have
        if new <= 0:
            return True
        if new * len(self._groups) > self._pool.available:
            return False
        self._reserve(row + 1, have + new)
        pages = self._pool.take(new * len(self._groups))
        for g, group in enumerate(self._groups):
            group.put(row, have, pages[g * new : (g + 1) * new])
        self.columns[row] = have + new
        return True

    def room(self, row: int) -> int:
        """Tokens that a row could hold in all with the pages available now."""
        return (int(self.columns[row]) + self._pool.available // len(self._groups)) * self.page_tokens

    def short(self, rows: Int32s, tokens: Int32s) -> Int32s:
        """Those of the rows whose pages do not reach `tokens` tokens."""
        return rows[tokens > self.columns[rows] * self.page_tokens]

    def register(self, row: int, digests: Digests, tokens: int) -> None:
        """Cache a row's full pages among its first `tokens` tokens, which are computed."""
        have, columns = int(self._registered[row]), tokens // self.page_tokens
        if not self.prefix_caching or columns <= have:
            return
        names = digests(columns)
        for g, group in enumerate(self._groups):
            for name, page in zip(names[have:columns], group.pages[row, have:columns].tolist(), strict=True):
                if page:
                    self._cache.register(g, name, page)
        self._registered[row] = columns

    def unregistered(self, rows: Int32s, tokens: Int32s) -> Int32s:
        """Indices into `rows` whose first `tokens` tokens fill pages that are not registered yet."""
        return np.flatnonzero(tokens // self.page_tokens > self._registered[rows]).astype(np.int32)

    def slide(self, rows: Int32s, tokens: Int32s) -> None:
        """Free what no query at position `tokens` or later reads."""
        for g in self._sliding:
            group = self._groups[g]
            first = np.maximum(tokens + 1 - (self.windows[g] or 0), 0) // self.page_tokens
            moved = first > group.starts[rows]
            for row, column in zip(rows[moved].tolist(), first[moved].tolist(), strict=True):
                self._pool.drop(reversed(group.slide(row, column)))

    def close(self, row: int, forget: bool = False) -> None:
        """End a row's sequence. forget: its pages are not to be trusted and leave the prefix cache."""
        self._open.remove(row)
        end = int(self.columns[row])
        starts = [int(group.starts[row]) for group in self._groups]
        held = [group.clear(row, end) for group in self._groups]
        if forget:
            pages = [page for ids in held for page in ids]
            for page in pages:
                self._cache.forget(page)
        if len(held) == 1:
            self._pool.drop(reversed(held[0]))
        else:
            for column in range(end - 1, -1, -1):
                self._pool.drop(ids[column - s] for ids, s in zip(held, starts, strict=True) if column >= s)
        self.columns[row] = self._shared[row] = self._registered[row] = 0

    def exclusive_pages(self, row: int) -> int:
        """Pages that closing this row would make available."""
        references, end = self._pool.references, int(self.columns[row])
        return sum(1 for group in self._groups for page in group.held(row, end) if references[page] == 1)

    def need(self, tokens: int, held: int, chunk: int) -> int:
        """Pages that a row with `held` columns will still take to reach `tokens` tokens, `chunk` in the next step."""
        rest = max(0, columns_of(tokens, self.page_tokens) - held)
        first = min(rest, columns_of(chunk, self.page_tokens))
        return sum(
            rest if w is None else max(first, min(rest, span_columns(w, 1, self.page_tokens))) for w in self.windows
        )

    def pending(self, rows: Int32s, tokens: Int32s) -> int:
        """Pages that rows will still take to reach `tokens` tokens each, beyond what they have."""
        rest = np.maximum(-(-tokens // self.page_tokens) - self.columns[rows], 0)
        total = 0
        for window in self.windows:
            most = rest if window is None else np.minimum(rest, span_columns(window, 1, self.page_tokens))
            total += int(most.sum())
        return total

    def count_lookup(self, tokens: int, found: int) -> None:
        """Note that `tokens` tokens of a prompt were looked up and `found` of them found."""
        if self.prefix_caching:
            self.queries += tokens
            self.hits += found

    def snapshot(self, rows: Int32s) -> tuple[Int32s, ...]:
        """Copies of the page tables of these rows, per group int32 [R, widest row]."""
        width = int(self.columns[rows].max(initial=0))
        return tuple(group.pages[rows, :width] for group in self._groups)

    def reset_prefix_cache(self) -> int:
        """Forget all prefixes; pages in use stay with their sequences but are shared no more. Returns pages freed."""
        before = self._pool.free
        self._pool.forget_idle(self._cache.clear())
        self._registered[list(self._open)] = _NEVER
        return self._pool.free - before

    def _reserve(self, rows: int, columns: int) -> None:
        for group in self._groups:
            group.reserve(rows, columns)
        size = self._groups[0].pages.shape[0]
        if size > len(self.columns):
            grow = size - len(self.columns)
            self.columns = np.pad(self.columns, (0, grow))
            self._shared = np.pad(self._shared, (0, grow))
            self._registered = np.pad(self._registered, (0, grow))

    # Invariants

    def names_of(self, row: int, group: int) -> list[bytes | None]:
        """Per column of a row, the digest under which its page is cached, or None."""
        pages = self._groups[group].pages[row, : self.columns[row]].tolist()
        return [named[1] if (named := self._cache.name(page)) else None for page in pages]

    def check_integrity(self) -> None:
        """Raise EngineError unless tables, reference counts, names and page states agree."""
        self._cache.check_integrity()
        self._pool.check_integrity()
        closed = [row for row, columns in enumerate(self.columns.tolist()) if columns and row not in self._open]
        if closed:
            raise EngineError(f"pager: rows {closed} are closed and hold pages")
        holders = np.zeros(self.num_pages, np.int64)
        writers = np.zeros(self.num_pages, np.int64)
        place = np.full(self.num_pages, -1, np.int64)
        for g, group in enumerate(self._groups):
            columns = np.arange(group.pages.shape[1], dtype=np.int32)
            held = (columns >= group.starts[:, None]) & (columns < self.columns[:, None])
            if ((group.pages != 0) != held).any() or (group.starts > self.columns).any():
                raise EngineError(f"pager: group {g} has entries outside its rows' columns, or gaps")
            pages, column = group.pages[held], np.nonzero(held)[1]
            if (place[pages] >= 0).any():
                raise EngineError(f"pager: a page of group {g} serves another group too")
            place[pages] = column
            if (place[pages] != column).any():
                raise EngineError(f"pager: a page of group {g} stands in two columns")
            holders += np.bincount(pages, minlength=self.num_pages)
            own = held & (columns >= self._shared[:, None])
            writers += np.bincount(group.pages[own], minlength=self.num_pages)
            if any(named[0] != g for page in set(pages.tolist()) if (named := self._cache.name(page))):
                raise EngineError(f"pager: a page of group {g} is cached for another group")
        if (holders != self._pool.references).any():
            raise EngineError(f"pager: pages {np.flatnonzero(holders != self._pool.references)[:5]} are miscounted")
        if (writers > 1).any():
            raise EngineError(f"pager: pages {np.flatnonzero(writers > 1)[:5]} are written by two rows")
