"""Group `state`: the paged state holds what is put in, page by page, and its handles live and die as declared."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from hardpoint_platforms.conformance.checks import Check, Group, Measure, Wrong
from hardpoint_platforms.conformance.comparison import require_equal
from hardpoint_platforms.conformance.contracts import short
from hardpoint_platforms.conformance.execution import Tree
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.ops.samples import Source
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, CanonicalPages, LayerCache, State, StateCache

PAGES = 9


def checks(subject: Subject) -> Iterator[Check]:
    """Level 2: every page size and dtype, over keys and values and over latents."""
    facts = subject.device.capabilities()
    for page_tokens in facts.page_tokens:
        for dtype in facts.kv_dtypes:
            for kind in ("keys and values", "latents"):
                layout = layout_of(kind, page_tokens, dtype)
                for name, body in (
                    ("starts at zero", _zero),
                    ("export gives what import took", _round_trip),
                    ("copies pages", _copies),
                    ("swap out and in", _swap),
                ):
                    title = f"{kind} page-{page_tokens} {name}"
                    yield Check("state", "state_cache", title, 2, partial(body, layout), dtype=short(dtype))
    layout = layout_of("keys and values", facts.page_tokens[0], facts.kv_dtypes[0])
    for name, body in (
        ("a handle lives and dies as declared", _donation),
        ("a page's bytes are counted", _page_bytes),
        ("running out is OutOfDeviceMemory", _runs_out),
        ("two states share nothing", _two_states),
    ):
        yield Check("state", "state_cache", name, 2, partial(body, layout), dtype=short(layout.dtype))


def layout_of(kind: str, page_tokens: int, dtype: torch.dtype) -> CacheLayout:
    """Three pool layers in two groups, of keys and values or of latents."""
    parts = (("k", 2, 24), ("v", 2, 16)) if kind == "keys and values" else (("latent", 1, 40), ("rope_key", 1, 8))
    groups = (CacheGroup((0, 2, 4)), CacheGroup((1, 3, 5), window=32))
    return CacheLayout(groups, (LayerCache(parts),) * 3, page_tokens, dtype)


def tree_of(layout: CacheLayout, count: int, seed: int) -> Tree:
    """Random pages on the host."""
    source = Source(seed)
    return tuple(
        tuple(source.normal(count, layout.page_tokens, heads, width, dtype=layout.dtype) for _, heads, width in c.parts)
        for c in layout.pool
    )


def filled(cache: StateCache, layout: CacheLayout, seed: int) -> tuple[State, Tree]:
    """A state of `PAGES` pages, and what it holds."""
    tree = tree_of(layout, PAGES, seed)
    ids = tuple(range(PAGES))
    state = cache.import_pages(cache.allocate(layout, PAGES), ids, CanonicalPages(layout, ids, tree))
    return state, tree


def require_pages(
    cache: StateCache, state: State, layout: CacheLayout, ids: list[int], wanted: Tree, what: str
) -> None:
    """The pages `ids` hold the rows of `wanted`. Raises Wrong."""
    found = cache.export_pages(state, layout, ids)
    code = type(cache).export_pages
    if not isinstance(found, CanonicalPages) or len(found.data) != len(wanted):
        raise Wrong(f"export_pages() gives {found!r:.60}, not CanonicalPages of every pool layer", subject_code=code)
    if tuple(found.page_ids) != tuple(ids):
        raise Wrong(f"export_pages() of {ids} says that it gives {list(found.page_ids)}", subject_code=code)
    for number, (ours, theirs) in enumerate(zip(found.data, wanted, strict=True)):
        if len(ours) != len(theirs):
            raise Wrong(f"export_pages() gives {len(ours)} parts of layer {number}", subject_code=code)
        for part, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            require_equal(a, b, f"{what}: layer {number}, part {part}", code)


def _rows(tree: Tree, ids: list[int]) -> Tree:
    return tuple(tuple(part[ids] for part in layer) for layer in tree)


def _zero(layout: CacheLayout, subject: Subject, seed: int) -> Measure:
    cache = subject.device.state_cache()
    for _ in range(2):
        state = cache.allocate(layout, PAGES)
        wanted = tuple(tuple(torch.zeros_like(part) for part in layer) for layer in tree_of(layout, PAGES, seed))
        require_pages(cache, state, layout, list(range(PAGES)), wanted, "a fresh state")
        filled(cache, layout, seed)
    return Measure()


def _round_trip(layout: CacheLayout, subject: Subject, seed: int) -> Measure:
    cache = subject.device.state_cache()
    state, tree = filled(cache, layout, seed)
    for ids in (list(range(PAGES)), [7, 2, 5], [3], [8, 0]):
        require_pages(cache, state, layout, ids, _rows(tree, ids), f"pages {ids}")
    fresh, targets = tree_of(layout, 3, seed + 1), [6, 1, 4]
    state = cache.import_pages(state, targets, CanonicalPages(layout, (6, 1, 4), fresh))
    require_pages(cache, state, layout, targets, fresh, f"pages {targets}, written in this order")
    others = [page for page in range(PAGES) if page not in targets]
    require_pages(cache, state, layout, others, _rows(tree, others), "pages that were not written")
    return Measure()


def _copies(layout: CacheLayout, subject: Subject, seed: int) -> Measure:
    cache = subject.device.state_cache()
    state, tree = filled(cache, layout, seed)
    sources, targets = [2, 7, 3], [5, 1, 8]
    state = cache.copy_pages(state, sources, targets)
    code = type(cache).copy_pages
    if state is None:
        raise Wrong("copy_pages() returns None, not the new state", subject_code=code)
    require_pages(cache, state, layout, targets, _rows(tree, sources), f"pages {sources} copied to {targets}")
    others = [page for page in range(PAGES) if page not in targets]
    require_pages(cache, state, layout, others, _rows(tree, others), "pages that were not copied to")
    return Measure()


def _swap(layout: CacheLayout, subject: Subject, seed: int) -> Measure:
    """Out to the host, their places used by others, back in to other places."""
    cache = subject.device.state_cache()
    state, tree = filled(cache, layout, seed)
    out = cache.export_pages(state, layout, [1, 2])
    state = cache.import_pages(state, [1, 2], CanonicalPages(layout, (1, 2), tree_of(layout, 2, seed + 2)))
    state = cache.import_pages(state, [6, 4], out)
    require_pages(cache, state, layout, [6, 4], _rows(tree, [1, 2]), "pages swapped out and in")
    return Measure()


def _donation(layout: CacheLayout, subject: Subject, seed: int) -> Measure:
    device = subject.device
    cache = device.state_cache()
    old, tree = filled(cache, layout, seed)
    new = cache.copy_pages(old, [1], [2])
    code = type(cache).copy_pages
    functional = device.capabilities().functional_state
    try:
        seen = cache.export_pages(old, layout, [2]).data[0][0]
    except Exception as error:
        if functional:
            return Measure(f"an old handle raises {type(error).__name__}")
        told = f"functional_state is False, yet an old handle raises {type(error).__name__}"
        raise Wrong(told, subject_code=code) from error
    changed, kept = torch.equal(seen, tree[0][0][[1]]), torch.equal(seen, tree[0][0][[2]])
    if functional and (new is old or changed):
        raise Wrong("functional_state is True, yet the old handle shows the new pages", subject_code=code)
    if not functional and new is not old and not changed:
        raise Wrong(
            "functional_state is False, yet the state was copied and the old one left behind", subject_code=code
        )
    if not functional:
        return Measure("in place, as declared")
    return Measure("an old handle keeps what it held" if kept else "an old handle is poisoned")


def _page_bytes(layout: CacheLayout, subject: Subject, seed: int) -> Measure:
    cache = subject.device.state_cache()
    size = cache.page_bytes(layout)
    code = type(cache).page_bytes
    if not isinstance(size, int) or size < layout.page_bytes:
        raise Wrong(f"page_bytes() says {size}, the contents alone are {layout.page_bytes}", subject_code=code)
    if size > 16 * layout.page_bytes:
        raise Wrong(f"page_bytes() says {size} for {layout.page_bytes} bytes of contents", subject_code=code)
    return Measure()


def _runs_out(layout: CacheLayout, subject: Subject, seed: int) -> Measure:
    cache = subject.device.state_cache()
    code = type(cache).allocate
    count = (1 << 50) // layout.page_bytes
    try:
        cache.allocate(layout, count)
    except OutOfDeviceMemory:
        return Measure()
    except Exception as error:
        told = f"allocate() of 2^50 bytes raises {type(error).__name__}, not OutOfDeviceMemory"
        raise Wrong(told, subject_code=code) from error
    raise Wrong("allocate() of 2^50 bytes returns a state", subject_code=code)


def _two_states(layout: CacheLayout, subject: Subject, seed: int) -> Measure:
    cache = subject.device.state_cache()
    first, held = filled(cache, layout, seed)
    filled(cache, layout, seed + 3)
    everything = list(range(PAGES))
    require_pages(cache, first, layout, everything, held, "a state after another was allocated")
    return Measure()


GROUP = Group("state", "paged state", checks)
