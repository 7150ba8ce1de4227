"""Who may use a page: free list, reference counts, and the order in which cached pages are given up.

    take                     drop, last reference, no name
free ----> referenced  ------------------------------------> free
             ^    |      drop, last reference, named
        hold |    +-----------------------------------> idle     (cached; still counts as available)
             +---------------------------------------- idle
                                oldest idle page, when the free list is empty ----> referenced, name forgotten
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from hardpoint.errors import EngineError
from hardpoint.kv.prefix_cache import PrefixCache


class BlockPool:
    """Owns the pages 1 .. num_pages - 1. Page 0 belongs to nobody.

    Attributes:
        references: per page, how many sequences hold it.
    """

    def __init__(self, num_pages: int, cache: PrefixCache) -> None:
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self._cache = cache
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `take` can give, idle cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that hold a cached prefix and that nobody uses."""
        return len(self._idle)

    def take(self, count: int) -> list[int]:
        """`count` pages with one reference each; forgets the oldest idle ones if it must. Check `available` first."""
        free = self._free
        if count <= len(free):
            pages = free[len(free) - count :]
            del free[len(free) - count :]
        else:
            pages = free[:]
            free.clear()
            while len(pages) < count:
                page, _ = self._idle.popitem(last=False)
                self._cache.forget(page)
                pages.append(page)
        for page in pages:
            self.references[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more reference to each; 0 entries are skipped."""
        references, idle = self.references, self._idle
        for page in pages:
            if page:
                if not references[page]:
                    del idle[page]
                references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One reference less to each, in the order in which they should be given up; 0 entries are skipped."""
        references, cache = self.references, self._cache
        for page in pages:
            if page:
                references[page] -= 1
                if not references[page]:
                    if page in cache:
                        self._idle[page] = None
                    else:
                        self._free.append(page)

    def forget_idle(self, pages: Iterable[int]) -> None:
        """Move pages whose name was taken away from idle to free; others are skipped."""
        for page in pages:
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def idle_among(self, pages: Iterable[int]) -> int:
        """How many of these nobody uses: holding them takes that many off `available`."""
        references = self.references
        return sum(1 for page in pages if page and not references[page])

    def check_integrity(self) -> None:
        """Raise EngineError unless each page is in exactly one state and the states fit the names."""
        if min(self.references) < 0:
            raise EngineError("block pool: a reference count is negative")
        states = np.bincount(np.flatnonzero(self.references), minlength=self.num_pages)
        for pages in (self._free, list(self._idle)):
            states = states + np.bincount(np.array(pages, np.int64), minlength=self.num_pages)
        if states[0] or (states[1:] != 1).any():
            lost = np.flatnonzero(states != (np.arange(self.num_pages) > 0)).tolist()
            raise EngineError(f"block pool: pages {lost[:5]} are in no state or in two")
        if any(page in self._cache for page in self._free) or any(page not in self._cache for page in self._idle):
            raise EngineError("block pool: a free page has a name, or an idle one has none")
