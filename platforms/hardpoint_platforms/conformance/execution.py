"""Running one sample of a contract on a device: weights packed, state imported, batch planned, results brought back.

The state of a sample is a tree of host tensors. It goes into the device's own state through `import_pages` and comes
back through `export_pages`, so that a device may lay its pages out as it likes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.conformance.checks import Wrong
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpContract, Sample
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, CanonicalPages, LayerCache
from hardpoint_platforms.trees import mapped

#: Layers of parts of host tensors [pages, page_tokens, heads, width].
Tree = tuple[tuple[torch.Tensor, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """One call. `result`: on the host, without rows of padding; `pages`: the state after it, without page 0."""

    result: Any
    pages: Tree
    seconds: float
    kernel: Callable[..., Any]


def execute(device: Device, provider: OpProvider, case: Sample) -> Outcome:
    """Call the kernel once. Raises Wrong where it changes an argument that it may not, and whatever it raises."""
    contract = CONTRACTS[case.instance.op]
    with torch.inference_mode():
        weights = {name: mapped(weight, device.to_device) for name, weight in case.weights.items()}
        packed: object = provider.pack(case.instance, weights)
        if not isinstance(packed, tuple):
            told = f"pack() returned {type(packed).__name__}, not a tuple of tensors"
            raise Wrong(told, subject_code=type(provider).pack)
        given = case.make()
        batch_at = next((i for i, argument in enumerate(given) if isinstance(argument, AttentionBatch)), None)
        kept = [_copied(argument) for argument in given]
        kernel: Any = provider.build(case.instance)
        if not callable(kernel):
            told = f"build() returned {kernel!r:.60}, not something to call"
            raise Wrong(told, subject_code=type(provider).build)
        if batch_at is not None:
            return _call_paged(device, contract, provider, given, batch_at, packed if weights else None, kernel)
        arguments = [mapped(argument, device.to_device) for argument in given]
        if weights:
            arguments.append(packed)
        started = time.perf_counter()
        result = kernel(*arguments)
        device.synchronize()
        seconds = time.perf_counter() - started
        _check_untouched(contract, arguments, kept, device, kernel)
        return Outcome(mapped(result, device.to_host), (), seconds, kernel)


def _call_paged(
    device: Device,
    contract: OpContract,
    provider: OpProvider,
    given: tuple[Any, ...],
    batch_at: int,
    packed: Any,
    kernel: Any,
) -> Outcome:
    batch, tree = given[batch_at], given[batch_at - 1]
    planner = provider.planner()
    if planner is None:
        raise Wrong("takes a plan but planner() gives None", subject_code=type(provider).planner)
    layout = layout_of(tree, batch)
    state = put_state(device, layout, tree)
    arguments = [mapped(argument, device.to_device) for argument in given[: batch_at - 1]]
    arguments += [state, planner.plan(batch)]
    if packed is not None:
        arguments.append(packed)
    before = [_copied(argument) for argument in given[: batch_at - 1]]
    started = time.perf_counter()
    returned = kernel(*arguments)
    device.synchronize()
    seconds = time.perf_counter() - started
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise Wrong("the contract returns (out, state)", subject_code=kernel)
    out, state = returned
    _check_untouched(contract, arguments, before, device, kernel)
    pages = device.state_cache().export_pages(state, layout, range(1, tree_pages(tree))).data
    host = mapped(out, device.to_host)
    return Outcome(host[: batch.num_tokens] if isinstance(host, torch.Tensor) else host, pages, seconds, kernel)


def layout_of(tree: Tree, batch: AttentionBatch) -> CacheLayout:
    """The layout that a sample's state tree is of."""
    pool = tuple(
        LayerCache(tuple((f"part{i}", part.shape[2], part.shape[3]) for i, part in enumerate(layer))) for layer in tree
    )
    dtype = next(part.dtype for layer in tree for part in layer)
    groups = tuple(CacheGroup(tuple(range(len(pool)))) for _ in batch.page_tables)
    return CacheLayout(groups, pool, batch.page_tokens, dtype)


def put_state(device: Device, layout: CacheLayout, tree: Tree) -> Any:
    """A state on the device that holds the tree."""
    cache, count = device.state_cache(), tree_pages(tree)
    state = cache.allocate(layout, count)
    ids = tuple(range(count))
    return cache.import_pages(state, ids, CanonicalPages(layout, ids, tree))


def tree_pages(tree: Tree) -> int:
    """Pages of a tree, page 0 among them."""
    return next(part.shape[0] for layer in tree for part in layer)


def _copied(value: Any) -> Any:
    return mapped(value, torch.Tensor.clone)


def _check_untouched(
    contract: OpContract, arguments: list[Any], kept: list[Any], device: Device, kernel: object
) -> None:
    names = argument_names(contract)
    for name, now, then in zip(names, arguments, kept, strict=False):
        if name not in contract.mutates and not _same(mapped(now, device.to_host), then):
            raise Wrong(f"changes its argument {name!r}, which it may not", subject_code=kernel)


def _same(now: Any, then: Any) -> bool:
    if isinstance(then, torch.Tensor):
        return bool(((now == then) | ((now != now) & (then != then))).all())
    if isinstance(then, tuple):
        return all(_same(a, b) for a, b in zip(now, then, strict=True))
    if dataclasses.is_dataclass(then) and not isinstance(then, type):
        return all(_same(getattr(now, f.name), getattr(then, f.name)) for f in dataclasses.fields(then))
    return True


def argument_names(contract: OpContract) -> tuple[str, ...]:
    """Argument names out of the contract's signature, in order."""
    inside, depth, parts = contract.signature.partition("(")[2], 0, [""]
    for letter in inside:
        if letter == ")" and depth == 0:
            break
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return tuple(part.partition(":")[0].strip() for part in parts)
