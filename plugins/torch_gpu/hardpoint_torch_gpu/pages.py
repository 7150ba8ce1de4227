"""Pages of the paged state: copied on the device, and to and from pinned host memory with every copy under way at once.

Exported pages lie in pinned memory: what is swapped out comes back at the speed of the bus.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint_platforms.state_cache import CacheLayout, CanonicalPages, DenseStateCache, State


class GpuStateCache(DenseStateCache):
    """Dense tensors, one per pool layer and part. The host waits for exports alone."""

    def copy_pages(self, state: State, sources: Sequence[int], targets: Sequence[int]) -> State:
        from_ids, to_ids = self._ids(sources, targets)
        for parts in state:
            for part in parts:
                part.index_copy_(0, to_ids, part.index_select(0, from_ids))
        return state

    def export_pages(self, state: State, layout: CacheLayout, page_ids: Sequence[int]) -> CanonicalPages:
        (ids,) = self._ids(page_ids)
        host = iter(self._device.read_back([part.index_select(0, ids) for parts in state for part in parts]).wait())
        return CanonicalPages(layout, tuple(page_ids), tuple(tuple(next(host) for _ in parts) for parts in state))

    def import_pages(self, state: State, page_ids: Sequence[int], pages: CanonicalPages) -> State:
        (ids,) = self._ids(page_ids)
        for parts, incoming in zip(state, pages.data, strict=True):
            for part, tensor in zip(parts, incoming, strict=True):
                part.index_copy_(0, ids, self._device.to_device(tensor).to(part.dtype))
        return state

    def _ids(self, *lists: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return self._device.upload([torch.tensor(list(ids), dtype=torch.int64) for ids in lists])
