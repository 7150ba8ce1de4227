"""Group `transfer`: pages move between this device and every other installed platform, there and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from hardpoint_platforms.conformance.checks import Check, Group, Measure, Unverified, Wrong
from hardpoint_platforms.conformance.contracts import short
from hardpoint_platforms.conformance.state import PAGES, filled, layout_of, require_pages
from hardpoint_platforms.conformance.subject import Subject, named
from hardpoint_platforms.device import Device
from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import PlatformError, UnsupportedOperation
from hardpoint_platforms.kv_transfer import CANONICAL
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.state_cache import CacheLayout


def checks(subject: Subject) -> Iterator[Check]:
    """Level 6."""
    facts = subject.device.capabilities()
    yield Check("transfer", "kv_transfer", "formats", 6, _formats)
    yield Check("transfer", "kv_transfer", "lists of other lengths are refused", 6, _uneven)
    others = [name for name in discover().entries if name != subject.entry.name]
    for other in dict.fromkeys((subject.entry.name, "reference", *others)):
        for dtype in facts.kv_dtypes:
            layout = layout_of("keys and values", facts.page_tokens[0], dtype)
            body = partial(_there_and_back, layout, other)
            yield Check("transfer", "kv_transfer", f"to {other} and back", 6, body, dtype=short(dtype))


def _formats(subject: Subject, seed: int) -> Measure:
    transfer = subject.device.kv_transfer()
    formats = transfer.formats()
    if not formats or formats[-1] != CANONICAL:
        raise Wrong(f"formats() is {formats!r}, it must end with {CANONICAL!r}", subject_code=type(transfer).formats)
    return Measure()


def _uneven(subject: Subject, seed: int) -> Measure:
    device = subject.device
    layout = layout_of("keys and values", device.capabilities().page_tokens[0], device.capabilities().kv_dtypes[0])
    cache, transfer = device.state_cache(), device.kv_transfer()
    state, _ = filled(cache, layout, seed)
    target, _ = filled(cache, layout, seed + 1)
    try:
        transfer.transfer((cache, state, [1, 2]), (cache, target, [3]), layout)
    except UnsupportedOperation:
        return Measure()
    raise Wrong("two pages into one are not refused", subject_code=type(transfer).transfer)


def _there_and_back(layout: CacheLayout, other: str, subject: Subject, seed: int) -> Measure:
    device = subject.device
    if other in (subject.entry.name, "reference"):
        _move(device, device if other == subject.entry.name else ReferenceDevice(), layout, seed)
        return Measure()
    try:
        second = named(other)
        away = second.device
    except PlatformError as error:
        raise Unverified(f"{other} cannot be opened here: {error.message}") from error
    try:
        if layout.dtype not in away.capabilities().kv_dtypes:
            raise Unverified(f"{other} does not cache {short(layout.dtype)}")
        _move(device, away, layout, seed)
    finally:
        second.close()
    return Measure()


def _move(here: Device, away: Device, layout: CacheLayout, seed: int) -> None:
    cache, far = here.state_cache(), away.state_cache()
    state, tree = filled(cache, layout, seed)
    target, _ = filled(far, layout, seed + 1)
    target = here.kv_transfer().transfer((cache, state, [4, 1, 6]), (far, target, [2, 8, 3]), layout)
    wanted = tuple(tuple(part[[4, 1, 6]] for part in layer) for layer in tree)
    require_pages(far, target, layout, [2, 8, 3], wanted, "pages sent away")
    fresh = cache.allocate(layout, PAGES)
    fresh = here.kv_transfer().transfer((far, target, [3, 2, 8]), (cache, fresh, [5, 7, 2]), layout)
    back = tuple(tuple(part[[6, 4, 1]] for part in layer) for layer in tree)
    require_pages(cache, fresh, layout, [5, 7, 2], back, "pages that came back")
    if not torch.equal(cache.export_pages(fresh, layout, [1]).data[0][0], torch.zeros_like(tree[0][0][[1]])):
        raise Wrong("a transfer changes a page that it was not given", subject_code=type(here.kv_transfer()).transfer)


GROUP = Group("transfer", "exchange of pages", checks, beside=True)
