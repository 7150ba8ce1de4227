"""State handles that die: whatever takes a state returns a new handle, and the old one raises when it is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hardpoint_platforms.device import Device
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.state_cache import CacheLayout, CanonicalPages, DenseStateCache, State
from hardpoint_platforms.strict.errors import StaleState, StrictViolation
from hardpoint_platforms.strict.ledger import Ledger

#: Pool layers of parts, as `DenseStateCache` makes them.
Tree = tuple[tuple[torch.Tensor, ...], ...]


class StateHandle:
    """One generation of a state. Whoever takes the tree out makes the next handle."""

    def __init__(self, tree: Tree, generation: int = 0) -> None:
        self._tree: Tree | None = tree
        self.generation = generation
        self._taken_by = ""

    def tree(self, who: str) -> Tree:
        """The tensors, to be read alone. Raises StaleState where the handle is dead."""
        if self._tree is None:
            raise StaleState(
                f"{who} uses generation {self.generation} of the state, which {self._taken_by} took: "
                "pass on the state that was returned, and never touch an older one"
            )
        return self._tree

    def take(self, who: str) -> Tree:
        """The tensors, for good: the handle is dead from here on. Raises StaleState where it was already."""
        tree = self.tree(who)
        self._tree, self._taken_by = None, who
        return tree

    def next(self, tree: Tree) -> StateHandle:
        """The handle of the next generation."""
        return StateHandle(tree, self.generation + 1)


def handle_of(state: State, who: str) -> StateHandle:
    """The state as a handle. Raises StrictViolation for anything else."""
    if isinstance(state, StateHandle):
        return state
    raise StrictViolation(f"{who} got {type(state).__name__} as state: pass the handle that was returned last")


def poison(old: Tree, new: Tree) -> None:
    """Overwrite the tensors of `old` that `new` does not hold, as a chip does that uses a donated buffer again."""
    kept = {id(part) for parts in new for part in parts}
    with _disable_current_modes(), torch.inference_mode():
        for part in (part for parts in old for part in parts):
            if id(part) not in kept and not isinstance(part, FakeTensor):
                part.fill_(float("nan") if part.dtype.is_floating_point else 0x5A)


class StrictStateCache(DenseStateCache):
    """The default cache behind handles. Its own writes move the tensors to the new handle."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        super().__init__(device)
        self._ledger = ledger

    def allocate(self, layout: CacheLayout, num_pages: int) -> State:
        size = num_pages * self.page_bytes(layout)
        self._ledger.require(size, f"{num_pages} pages")
        try:
            return StateHandle(super().allocate(layout, num_pages))
        except MemoryError as error:
            raise OutOfDeviceMemory(f"no room for {num_pages} pages, {size} bytes") from error

    def copy_pages(self, state: State, sources: Sequence[int], targets: Sequence[int]) -> State:
        return self._moved(state, "copy_pages", super().copy_pages, sources, targets)

    def import_pages(self, state: State, page_ids: Sequence[int], pages: CanonicalPages) -> State:
        return self._moved(state, "import_pages", super().import_pages, page_ids, pages)

    def export_pages(self, state: State, layout: CacheLayout, page_ids: Sequence[int]) -> CanonicalPages:
        return super().export_pages(handle_of(state, "export_pages").tree("export_pages"), layout, page_ids)

    def _moved(self, state: State, who: str, write: Any, *arguments: Any) -> StateHandle:
        handle = handle_of(state, who)
        with torch.inference_mode():
            return handle.next(write(handle.take(who), *arguments))
