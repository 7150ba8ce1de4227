"""Pages that move: the GPU's cache against the dense one, page for page."""

from __future__ import annotations

import pytest
import torch
from hardpoint_torch_gpu.pages import GpuStateCache

from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, DenseStateCache, LayerCache

pytestmark = pytest.mark.reference
LAYERS = {
    "keys and values": LayerCache((("k", 2, 8), ("v", 2, 4))),
    "latents": LayerCache((("latent", 1, 16), ("rope_key", 1, 4))),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_moves_what_the_dense_cache_moves(kind: str, dtype: torch.dtype) -> None:
    layout = CacheLayout((CacheGroup((0, 1)),), (LAYERS[kind],) * 2, 4, dtype)
    device = ReferenceDevice()
    caches = GpuStateCache(device), DenseStateCache(device)
    states = []
    for cache in caches:
        state = cache.allocate(layout, 9)
        generator = torch.Generator().manual_seed(3)
        for parts in state:
            for part in parts:
                part.copy_(torch.randn(part.shape, generator=generator))
        state = cache.copy_pages(state, [1, 5], [7, 2])
        sent = cache.export_pages(state, layout, [7, 3, 1])
        assert sent.page_ids == (7, 3, 1)
        states.append(cache.import_pages(state, [4, 8, 6], sent))
    for ours, theirs in zip(*states, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    first = states[0][0][0]
    assert torch.equal(first[4], first[1])
    assert not torch.equal(first[4], first[5])


def test_a_page_that_is_not_there_is_refused() -> None:
    layout = CacheLayout((CacheGroup((0,)),), (LAYERS["keys and values"],), 4, torch.float32)
    cache = GpuStateCache(ReferenceDevice())
    state = cache.allocate(layout, 3)
    with pytest.raises((IndexError, RuntimeError)):
        cache.export_pages(state, layout, [3])
