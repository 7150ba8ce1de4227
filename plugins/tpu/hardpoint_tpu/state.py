"""The paged state: one JAX array per pool layer and part, donated to whatever changes it.

A donated buffer is gone: the handle that held it dies, and a later use says who took it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from hardpoint_platforms.errors import PlatformError, UnsupportedOperation
from hardpoint_platforms.state_cache import CacheLayout, CanonicalPages, State, StateCache
from hardpoint_tpu.arrays import to_numpy, to_torch
from hardpoint_tpu.memory import Memory
from hardpoint_tpu.mesh import APART, SAME
from hardpoint_tpu.runtime import Runtime
from hardpoint_tpu.trees import gather

#: Pages that one program moves: shapes are fixed, so that there is one program.
_PAGES_AT_ONCE = 16


@dataclass(frozen=True, eq=False)
class Pools:
    """What a state holds: per pool layer its parts, tensors [pages, page_tokens, heads * width]; on several chips one
    after another those of each.

    Heads lie side by side, so that one head of a page is a tile of its own, and a page needs no padding for few heads.

    Attributes:
        layers: the tensors; shapes: (heads, width) of each.
    """

    layers: tuple[tuple[torch.Tensor, ...], ...]
    shapes: tuple[tuple[tuple[int, int], ...], ...]

    def only(self, layer: int) -> Pools:
        """One layer, as the first."""
        return Pools((self.layers[layer],), (self.shapes[layer],))

    def with_layer(self, layer: int, other: Pools) -> Pools:
        """With the only layer of `other` in place of one."""
        layers = (*self.layers[:layer], other.layers[0], *self.layers[layer + 1 :])
        return Pools(layers, self.shapes)

    def spread(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The tree as the reference has it: [pages, page_tokens, heads, width]."""
        return tuple(
            tuple(part.reshape((*part.shape[:2], *shape)) for part, shape in zip(parts, shapes, strict=True))
            for parts, shapes in zip(self.layers, self.shapes, strict=True)
        )

    def gathered(self, tree: tuple[tuple[torch.Tensor, ...], ...]) -> Pools:
        """The inverse of `spread`."""
        layers = tuple(tuple(part.reshape((*part.shape[:2], -1)) for part in parts) for parts in tree)
        return Pools(layers, self.shapes)


class StaleState(PlatformError):
    """A state handle was used after a program or a page operation had taken its buffers."""


class StateHandle:
    """One generation of a state. Whoever takes the tree makes the next handle."""

    __slots__ = ("_taken_by", "_tree")

    def __init__(self, tree: Pools) -> None:
        self._tree: Pools | None = tree
        self._taken_by = ""

    def tree(self, who: str) -> Pools:
        """The tensors, to be read alone. Raises StaleState where the handle is dead."""
        if self._tree is None:
            raise StaleState(
                f"{who} uses a state that {self._taken_by} took",
                hint="pass on the state that was returned, and never touch an older one",
            )
        return self._tree

    def take(self, who: str) -> Pools:
        """The tensors, for good: their buffers are donated. Raises StaleState where the handle was dead already."""
        tree = self.tree(who)
        self._tree, self._taken_by = None, who
        return tree


def handle_of(state: State, who: str) -> StateHandle:
    """The state as a handle. Raises StaleState for anything else."""
    if isinstance(state, StateHandle):
        return state
    raise StaleState(f"{who} got {type(state).__name__} as state: pass the handle that was returned last")


class TpuStateCache(StateCache):
    """Arrays as `Pools` has them, moved by three programs of fixed shape."""

    def __init__(self, runtime: Runtime, memory: Memory) -> None:
        self._runtime, self._memory = runtime, memory
        self._read = runtime.jit(_read)
        self._copy = runtime.jit(_copied, (0,), ((APART, SAME, SAME), APART))
        self._write = runtime.jit(_written, (0,))

    def page_bytes(self, layout: CacheLayout) -> int:
        return layout.page_bytes

    def allocate(self, layout: CacheLayout, num_pages: int) -> State:
        self._memory.require(num_pages * self.page_bytes(layout), f"{num_pages} pages")
        layers = tuple(
            tuple(
                self._memory.zeros((num_pages, layout.page_tokens, heads * width), layout.dtype, APART)
                for _, heads, width in layer.parts
            )
            for layer in layout.pool
        )
        shapes = tuple(tuple((heads, width) for _, heads, width in layer.parts) for layer in layout.pool)
        return StateHandle(Pools(layers, shapes))

    def copy_pages(self, state: State, sources: Sequence[int], targets: Sequence[int]) -> State:
        pools = handle_of(state, "copy_pages").take("copy_pages")
        parts = _parts(pools)
        for (here, _), (there, _) in zip(_pieces(sources), _pieces(targets), strict=True):
            parts = self._copy(parts, here, there)
        return self._handle(pools, parts)

    def export_pages(self, state: State, layout: CacheLayout, page_ids: Sequence[int]) -> CanonicalPages:
        self._on_one_chip("export_pages")
        pools = handle_of(state, "export_pages").tree("export_pages")
        parts = _parts(pools)
        pieces: list[list[torch.Tensor]] = [
            [torch.zeros((0, *part.shape[1:]), dtype=part.dtype)] for layer in pools.layers for part in layer
        ]
        for ids, count in _pieces(page_ids):
            for found, array in zip(pieces, self._read(parts, ids), strict=True):
                found.append(to_torch(array)[:count])
        whole = iter([torch.cat(found) for found in pieces])
        data = tuple(tuple(next(whole).unflatten(-1, shape) for shape in shapes) for shapes in pools.shapes)
        return CanonicalPages(layout, tuple(page_ids), data)

    def import_pages(self, state: State, page_ids: Sequence[int], pages: CanonicalPages) -> State:
        self._on_one_chip("import_pages")
        pools = handle_of(state, "import_pages").take("import_pages")
        parts, start = _parts(pools), 0
        dtypes = [part.dtype for layer in pools.layers for part in layer]
        incoming = [
            tensor.flatten(-2).to(dtype)
            for tensor, dtype in zip((part for layer in pages.data for part in layer), dtypes, strict=True)
        ]
        for ids, count in _pieces(page_ids):
            rows = tuple(_padded(tensor[start : start + count]) for tensor in incoming)
            # what is padded writes the first page once more
            parts = self._write(parts, np.where(np.arange(len(ids)) < count, ids, ids[0]), rows)
            start += count
        return self._handle(pools, parts)

    def _on_one_chip(self, what: str) -> None:
        if self._runtime.chips.count > 1:
            raise UnsupportedOperation(f"{what}: a page of a model that is cut over chips has a part on each")

    def _handle(self, pools: Pools, parts: Sequence[Any]) -> StateHandle:
        arrays = iter(parts)
        layers = tuple(tuple(self._runtime.wrap(next(arrays)) for _ in layer) for layer in pools.layers)
        return StateHandle(Pools(layers, pools.shapes))


def _read(parts: tuple[Any, ...], ids: Any) -> tuple[Any, ...]:
    return tuple(part[ids] for part in parts)


def _copied(parts: tuple[Any, ...], sources: Any, targets: Any) -> tuple[Any, ...]:
    return tuple(part.at[targets].set(part[sources]) for part in parts)


def _written(parts: tuple[Any, ...], ids: Any, rows: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.at[ids].set(jnp.asarray(new)) for part, new in zip(parts, rows, strict=True))


def _parts(pools: Pools) -> tuple[Any, ...]:
    arrays: list[Any] = []
    gather(pools, arrays)
    return tuple(arrays)


def _pieces(ids: Sequence[int]) -> Iterator[tuple[Any, int]]:
    """int32 [_PAGES_AT_ONCE] of page ids, padded with page 0, and how many of them are real."""
    for start in range(0, len(ids), _PAGES_AT_ONCE):
        some = list(ids[start : start + _PAGES_AT_ONCE])
        yield np.array(some + [0] * (_PAGES_AT_ONCE - len(some)), np.int32), len(some)


def _padded(rows: torch.Tensor) -> Any:
    """Rows of pages for one piece; those that are missing repeat the first."""
    missing = _PAGES_AT_ONCE - len(rows)
    whole = torch.cat((rows, rows[:1].expand(missing, *rows.shape[1:]))) if missing else rows
    return to_numpy(whole, copy=True)
