"""Which page holds which prefix: a hash chain over full pages.

    digest of column c = H(digest of column c - 1, tokens of column c)        digest of column -1 = H(salt)

so that a digest names the whole prefix up to its page, and requests under different salts never meet. 128 bits of
BLAKE2b: a collision, even a sought one, is out of reach.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from hardpoint.errors import EngineError

Int32s = npt.NDArray[np.int32]

_DIGEST_BYTES = 16


class HashChain:
    """Digests of a sequence's full pages. Belongs to one request and grows with its tokens."""

    __slots__ = ("_root", "digests")

    def __init__(self, salt: str = "") -> None:
        self._root = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
        self.digests: list[bytes] = []

    def extend(self, tokens: Int32s, page_tokens: int) -> None:
        """Hash the pages after those already hashed. tokens: int32, whole pages."""
        raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        size = 4 * page_tokens
        digests = self.digests
        parent = digests[-1] if digests else self._root
        for start in range(0, len(raw) - size + 1, size):
            parent = blake2b(parent + raw[start : start + size], digest_size=_DIGEST_BYTES).digest()
            digests.append(parent)


class PrefixCache:
    """Digest -> page, per group, and back. Knows nothing of reference counts: the block pool asks it."""

    def __init__(self, groups: int) -> None:
        self._pages: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._names: dict[int, tuple[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, page: int) -> bool:
        return page in self._names

    def find(self, group: int, digest: bytes) -> int:
        """The page of that prefix in that group, or 0."""
        return self._pages[group].get(digest, 0)

    def name(self, page: int) -> tuple[int, bytes] | None:
        """(group, digest) of a page, or None."""
        return self._names.get(page)

    def register(self, group: int, digest: bytes, page: int) -> bool:
        """Name a full page. False if another page has that prefix already, or this one has a name."""
        pages = self._pages[group]
        if digest in pages or page in self._names:
            return False
        pages[digest] = page
        self._names[page] = (group, digest)
        return True

    def forget(self, page: int) -> None:
        """Take a page's name away, if it has one."""
        named = self._names.pop(page, None)
        if named is not None:
            del self._pages[named[0]][named[1]]

    def clear(self) -> list[int]:
        """Take all names away; returns the pages that had one."""
        pages = list(self._names)
        self._names.clear()
        for group in self._pages:
            group.clear()
        return pages

    def check_integrity(self) -> None:
        """Raise EngineError unless both directions agree."""
        total = sum(len(pages) for pages in self._pages)
        if total != len(self._names):
            raise EngineError(f"prefix cache: {total} digests for {len(self._names)} pages")
        for page, (group, digest) in self._names.items():
            if self._pages[group].get(digest) != page:
                raise EngineError(f"prefix cache: page {page} is not found under its own digest")
