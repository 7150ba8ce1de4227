"""The paged state of a model: keys and values, MLA latents, recurrent states.

The core's pager deals in page ids alone. It cuts the model's attention layers into *groups* of equally many layers
(full attention, sliding window ...), so that one page has the same bytes in each group and all groups draw from one id
space: a page id names `page_tokens` tokens of every layer of the group that holds it.

    group 0 (full)      layers  5 11 17   ->  pool layers 0 1 2
    group 1 (sliding)   layers  0  1  2   ->  pool layers 0 1 2      page 7 belongs to one group at a time

Page 0 belongs to nobody: padded rows point there. The state is an opaque tree: the core passes on the handle that an
op returned and never touches an older one.

An op that a device leaves to the reference reads and writes the device's state, so where that can happen
`state[pool_layer]` must give the parts in the layout's order, and each part look like the dense
[pages, page_tokens, heads, width] to these forms of indexing, whatever it is inside. All indices are int64 tensors of
the device (`Device.to_device`); rows come in the dtype `part.dtype`.

    part[table]                    table [P] or [B, P]  ->  [P, page_tokens, heads, width], [B, P, ...]
    part[pages, 0]                 pages [N]            ->  [N, heads, width], token 0 of each page
    part[pages, offsets] = rows    pages, offsets [N], rows [N, heads, width]; a pair may be there twice (page 0)
    part[pages, 0] = rows          pages [N], rows [N, heads, width]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hardpoint_platforms.device import Device

#: The device's own tree; only the plugin looks inside.
State = Any


@dataclass(frozen=True)
class LayerCache:
    """What one pool layer keeps per token.

    `parts` are (name, heads, width): ("k", 8, 128), ("v", 8, 128), or ("latent", 1, 512), ("rope_key", 1, 64).
    """

    parts: tuple[tuple[str, int, int], ...]

    def elements_per_token(self) -> int:
        """Numbers stored per token."""
        return sum(heads * width for _, heads, width in self.parts)


@dataclass(frozen=True)
class CacheGroup:
    """A group of layers that share page tables.

    Attributes:
        layers: model layer numbers, in the order of the pool layers.
        window: tokens a query looks back, itself included; None for all.
    """

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True)
class CacheLayout:
    """What the pager and the attention kernels must agree on.

    Attributes:
        groups: groups of equally many layers; pool layer j of group g holds model layer groups[g].layers[j].
        pool: per pool layer, what it keeps (alike for all groups).
        page_tokens: tokens per page.
        dtype: of what is kept.
    """

    groups: tuple[CacheGroup, ...]
    pool: tuple[LayerCache, ...]
    page_tokens: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all pool layers, before the device's own alignment."""
        return self.page_tokens * self.dtype.itemsize * sum(layer.elements_per_token() for layer in self.pool)


@dataclass(frozen=True)
class CanonicalPages:
    """Pages in the exchange format of `kv_transfer`, on the host.

    `data` holds, per pool layer and part, a tensor [pages, page_tokens, heads, width].
    """

    layout: CacheLayout
    page_ids: tuple[int, ...]
    data: tuple[tuple[torch.Tensor, ...], ...]


class StateCache(ABC):
    """Allocates and moves the paged state on one device."""

    @abstractmethod
    def page_bytes(self, layout: CacheLayout) -> int:
        """Bytes that one page costs here, alignment included."""

    @abstractmethod
    def allocate(self, layout: CacheLayout, num_pages: int) -> State:
        """A state of `num_pages` pages (page 0 among them), zeroed.

        Raises OutOfDeviceMemory if it does not fit.
        """

    @abstractmethod
    def copy_pages(self, state: State, sources: Sequence[int], targets: Sequence[int]) -> State:
        """Copy page sources[i] to targets[i] in every pool layer; no page is both."""

    @abstractmethod
    def export_pages(self, state: State, layout: CacheLayout, page_ids: Sequence[int]) -> CanonicalPages:
        """Read pages into host memory in the canonical format."""

    @abstractmethod
    def import_pages(self, state: State, page_ids: Sequence[int], pages: CanonicalPages) -> State:
        """Write canonical pages to `page_ids`, in order."""


class DenseStateCache(StateCache):
    """The default: one tensor [pages, page_tokens, heads, width] per pool layer and part."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def page_bytes(self, layout: CacheLayout) -> int:
        return layout.page_bytes

    def allocate(self, layout: CacheLayout, num_pages: int) -> State:
        return tuple(
            tuple(
                self._device.zeros((num_pages, layout.page_tokens, heads, width), layout.dtype)
                for _, heads, width in layer.parts
            )
            for layer in layout.pool
        )

    def copy_pages(self, state: State, sources: Sequence[int], targets: Sequence[int]) -> State:
        for parts in state:
            for part in parts:
                part[list(targets)] = part[list(sources)]
        return state

    def export_pages(self, state: State, layout: CacheLayout, page_ids: Sequence[int]) -> CanonicalPages:
        ids = list(page_ids)
        data = tuple(tuple(self._device.to_host(part[ids]) for part in parts) for parts in state)
        return CanonicalPages(layout, tuple(page_ids), data)

    def import_pages(self, state: State, page_ids: Sequence[int], pages: CanonicalPages) -> State:
        ids = list(page_ids)
        for parts, incoming in zip(state, pages.data, strict=True):
            for part, tensor in zip(parts, incoming, strict=True):
                part[ids] = self._device.to_device(tensor).to(part.dtype)
        return state
