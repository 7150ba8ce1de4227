"""Which layers share page tables. All groups have equally many layers, so that one page costs the same in each.

Layers are sorted by window, widest first, and cut into equal pieces. A piece is as wide as its widest layer: a layer in
a wider group than its own merely keeps pages longer, since the attention op masks by the layer's own window.

    Gemma 3 270M: 15 sliding and 3 full layers, pieces of 3  ->  1 full group, 5 sliding groups
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardpoint_platforms.state_cache import CacheGroup, LayerCache

#: More groups mean more page tables to keep per request and step.
MAX_GROUPS = 16


@dataclass(frozen=True)
class Grouping:
    """Attributes:
    groups, pool: as `CacheLayout` has them.
    place: per layer its group and its place among the pool layers, -1 for a layer that is elsewhere.
    """

    groups: tuple[CacheGroup, ...]
    pool: tuple[LayerCache, ...]
    place: tuple[tuple[int, int], ...]


def group_layers(windows: Sequence[int | None], caches: Sequence[LayerCache]) -> Grouping:
    """Cut layers into groups; `windows` and `caches` have one entry per layer.

    Among the piece sizes that divide the number of layers and whose pieces are alike in what they cache, the one that
    keeps the fewest tokens is taken, then the one with the fewest groups. One group of all layers always fits.
    """
    count = len(windows)
    order = sorted(range(count), key=lambda layer: (_width(windows[layer]), repr(caches[layer])))
    best: tuple[tuple[float, float, int], list[list[int]]] | None = None
    for size in (size for size in range(1, count + 1) if count % size == 0):
        pieces = [sorted(order[start : start + size], key=_by_cache(caches)) for start in range(0, count, size)]
        if len(pieces) > MAX_GROUPS or not _alike(pieces, caches):
            continue
        cost = _cost(pieces, windows)
        if best is None or cost < best[0]:
            best = (cost, pieces)
    assert best is not None, "one piece of all layers is always possible"
    pieces = best[1]
    place = [(0, 0)] * count
    for group, piece in enumerate(pieces):
        for pool_layer, layer in enumerate(piece):
            place[layer] = (group, pool_layer)
    groups = tuple(CacheGroup(tuple(piece), _widest(piece, windows)) for piece in pieces)
    return Grouping(groups, tuple(caches[layer] for layer in pieces[0]), tuple(place))


def part_of(grouping: Grouping, layers: range) -> Grouping:
    """The same groups for the layers of one part of the model: pool layers that no other layer here uses are left out.

    Groups stay as many as they were, since page tables are those of the whole model; some may be empty.
    """
    used = sorted({grouping.place[layer][1] for layer in layers})
    index = {pool_layer: new for new, pool_layer in enumerate(used)}
    groups = tuple(
        CacheGroup(tuple(layer for layer in group.layers if layer in layers), group.window) for group in grouping.groups
    )
    place = tuple(
        (group, index[pool_layer]) if layer in layers else (group, -1)
        for layer, (group, pool_layer) in enumerate(grouping.place)
    )
    return Grouping(groups, tuple(grouping.pool[pool_layer] for pool_layer in used), place)


def _width(window: int | None) -> float:
    """Sort key: full attention first, then wide windows."""
    return float("-inf") if window is None else -window


def _by_cache(caches: Sequence[LayerCache]) -> Callable[[int], tuple[str, int]]:
    return lambda layer: (repr(caches[layer]), layer)


def _widest(piece: Sequence[int], windows: Sequence[int | None]) -> int | None:
    widths = [windows[layer] for layer in piece]
    known = [width for width in widths if width is not None]
    return None if len(known) < len(widths) else max(known)


def _alike(pieces: Sequence[Sequence[int]], caches: Sequence[LayerCache]) -> bool:
    first = [caches[layer] for layer in pieces[0]]
    return all([caches[layer] for layer in piece] == first for piece in pieces)


def _cost(pieces: Sequence[Sequence[int]], windows: Sequence[int | None]) -> tuple[float, float, int]:
    """Layers that keep everything, then tokens kept by the others, then groups."""
    widest = [_widest(piece, windows) for piece in pieces]
    full = sum(len(piece) for piece, width in zip(pieces, widest, strict=True) if width is None)
    kept = sum(len(piece) * width for piece, width in zip(pieces, widest, strict=True) if width is not None)
    return full, kept, len(pieces)
