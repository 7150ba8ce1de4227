"""The paged state in the chip's own layout.

A part of `heads` heads of `width` numbers per token lies as [heads, pages, width / 8, page_tokens, 8]: the matrix unit
reads eight numbers of all tokens of a page at once. Widths are rounded up to eight, pages to 512 bytes per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from acme_npu.memory import ALIGNMENT, CHIP, AcmeTensor, Block, lazy_zeros
from hardpoint_platforms.state_cache import CacheLayout, CanonicalPages, LayerCache, State, StateCache

LANES = 8


def rounded(width: int) -> int:
    """`width` rounded up to whole lanes."""
    return -(-width // LANES) * LANES


@dataclass(frozen=True, eq=False)
class BlockedPart:
    """One part of one pool layer. `blocks` is the chip's layout, `width` the numbers that mean something.

    Indexing speaks the dense form [pages, page_tokens, heads, width], which is what reference kernels read and write:
    `part[table]` and `part[pages, offsets] = rows`.
    """

    blocks: AcmeTensor
    width: int

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, tuple):
            found: torch.Tensor = CHIP.launch(read_rows, self.blocks, *index, self.width)
        else:
            found = CHIP.launch(read_pages, self.blocks, index, self.width)
        return found

    def __setitem__(self, index: Any, rows: torch.Tensor) -> None:
        CHIP.launch(write_rows, self.blocks, *index, rows)


def read_pages(blocks: torch.Tensor, table: torch.Tensor, width: int) -> torch.Tensor:
    """Pages table[...] in the dense form: [..., page_tokens, heads, width]."""
    found = blocks[:, table.flatten().long()].permute(1, 3, 0, 2, 4).flatten(-2)[..., :width]
    return found.reshape(*table.shape, *found.shape[1:])


def read_rows(blocks: torch.Tensor, pages: torch.Tensor, offsets: Any, width: int) -> torch.Tensor:
    """[n, heads, width]: token offsets[n] (or one offset for all) of pages[n]."""
    at = torch.as_tensor(offsets).expand_as(pages)
    return blocks[:, pages, :, at, :].flatten(-2)[..., :width]


def write_rows(blocks: torch.Tensor, pages: torch.Tensor, offsets: Any, rows: torch.Tensor) -> None:
    """Store rows [n, heads, width] at token offsets[n] of pages[n]."""
    full = torch.nn.functional.pad(rows, (0, blocks.shape[2] * LANES - rows.shape[-1]))
    at = torch.as_tensor(offsets).expand_as(pages)
    blocks[:, pages, :, at, :] = full.unflatten(-1, (-1, LANES)).to(blocks.dtype)


def keys_of(blocks: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[heads, n * page_tokens, width rounded up] of pages [n], for the attention kernels."""
    return blocks[:, pages].permute(0, 1, 3, 2, 4).flatten(-2).flatten(1, 2)


class BlockedStateCache(StateCache):
    """Allocates and moves blocked pages. In place, so that the handle stays the same."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def page_bytes(self, layout: CacheLayout) -> int:
        return sum(_part_bytes(layout, heads, width) for layer in layout.pool for _, heads, width in layer.parts)

    def allocate(self, layout: CacheLayout, num_pages: int) -> State:
        return tuple(self._layer(layout, layer, num_pages) for layer in layout.pool)

    def _layer(self, layout: CacheLayout, layer: LayerCache, num_pages: int) -> tuple[BlockedPart, ...]:
        parts = []
        for _, heads, width in layer.parts:
            block = Block(CHIP, num_pages * _part_bytes(layout, heads, width))
            shape = (heads, num_pages, rounded(width) // LANES, layout.page_tokens, LANES)
            parts.append(BlockedPart(CHIP.wrap(lazy_zeros(shape, layout.dtype), block), width))
        return tuple(parts)

    def copy_pages(self, state: State, sources: Sequence[int], targets: Sequence[int]) -> State:
        for part in _parts(state):
            part.blocks.inner[:, list(targets)] = part.blocks.inner[:, list(sources)]
        return state

    def export_pages(self, state: State, layout: CacheLayout, page_ids: Sequence[int]) -> CanonicalPages:
        ids = torch.tensor(list(page_ids), dtype=torch.int64)

        def dense(part: BlockedPart) -> torch.Tensor:
            found = read_pages(part.blocks.inner, ids, part.width)
            return found.flip(2) if self._fault == "permuted_heads" else found.clone()

        return CanonicalPages(layout, tuple(page_ids), tuple(tuple(map(dense, layer)) for layer in state))

    def import_pages(self, state: State, page_ids: Sequence[int], pages: CanonicalPages) -> State:
        for layer, incoming in zip(state, pages.data, strict=True):
            for part, tensor in zip(layer, incoming, strict=True):
                tokens = tensor.shape[1]
                ids = torch.tensor(list(page_ids), dtype=torch.int64).repeat_interleave(tokens)
                write_rows(part.blocks.inner, ids, torch.arange(tokens).repeat(len(page_ids)), tensor.flatten(0, 1))
        return state


def _part_bytes(layout: CacheLayout, heads: int, width: int) -> int:
    size = layout.page_tokens * rounded(width) * layout.dtype.itemsize
    return heads * -(-size // ALIGNMENT) * ALIGNMENT


def _parts(state: State) -> list[BlockedPart]:
    return [part for layer in state for part in layer]
