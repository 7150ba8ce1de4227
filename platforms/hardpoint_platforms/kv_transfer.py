"""Moving pages between devices, of one vendor or of two. The default goes through host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.state_cache import CacheLayout, State, StateCache

#: Keys and values as `CanonicalPages`: row-major [pages, page_tokens, heads, width], unsharded heads.
CANONICAL = "canonical-1"


class KVTransfer(ABC):
    """Transfers pages between this device's state and another's."""

    @abstractmethod
    def formats(self) -> tuple[str, ...]:
        """Formats it sends and receives, fastest first; always ends with `CANONICAL`."""

    @abstractmethod
    def transfer(
        self,
        source: tuple[StateCache, State, Sequence[int]],
        target: tuple[StateCache, State, Sequence[int]],
        layout: CacheLayout,
    ) -> State:
        """Copy source pages to target pages, in order, and return the target's new state.

        Raises UnsupportedOperation if the page lists differ in length.
        """


class HostTransfer(KVTransfer):
    """The default: export to host memory in the canonical format, import on the other side."""

    def formats(self) -> tuple[str, ...]:
        return (CANONICAL,)

    def transfer(
        self,
        source: tuple[StateCache, State, Sequence[int]],
        target: tuple[StateCache, State, Sequence[int]],
        layout: CacheLayout,
    ) -> State:
        from_cache, from_state, from_pages = source
        to_cache, to_state, to_pages = target
        if len(from_pages) != len(to_pages):
            raise UnsupportedOperation(f"{len(from_pages)} pages cannot fill {len(to_pages)}")
        return to_cache.import_pages(to_state, to_pages, from_cache.export_pages(from_state, layout, from_pages))
