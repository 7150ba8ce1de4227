"""Donation: whoever takes a state kills the old handle, and what the old one held is overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import strict_bench as bench
import torch

from hardpoint_platforms.conformance.execution import layout_of as layout_of_sample
from hardpoint_platforms.conformance.execution import put_state
from hardpoint_platforms.conformance.state import filled, layout_of
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.state_cache import CanonicalPages
from hardpoint_platforms.strict.errors import ForbiddenWrite, StaleState, StrictViolation

pytestmark = pytest.mark.reference
LAYOUT = layout_of("keys and values", 8, torch.float32)


def test_page_operations_kill_the_old_handle() -> None:
    cache = bench.opened().state_cache()
    old, tree = filled(cache, LAYOUT, 1)
    new = cache.copy_pages(old, [1], [2])
    with pytest.raises(StaleState, match=r"export_pages uses generation 1 of the state, which copy_pages took"):
        cache.export_pages(old, LAYOUT, [1])
    with pytest.raises(StaleState):
        cache.copy_pages(old, [1], [2])
    ids = (3,)
    newer = cache.import_pages(new, ids, CanonicalPages(LAYOUT, ids, cache.export_pages(new, LAYOUT, [1]).data))
    with pytest.raises(StaleState, match="which import_pages took"):
        cache.import_pages(new, ids, CanonicalPages(LAYOUT, ids, tree))
    assert torch.equal(cache.export_pages(newer, LAYOUT, [3]).data[0][0], tree[0][0][[1]])


def test_a_run_kills_the_old_handle() -> None:
    device = bench.opened()
    program, inputs = bench.built(device, lambda x: x + 1), bench.step_inputs(torch.ones(2))
    first = bench.fresh_state(device)
    second = program.prepare(inputs, first, ())
    with pytest.raises(StaleState, match="generation 0 of the state, which the program of any tokens"):
        program.run(inputs, first, ())
    _, third = program.run(inputs, second, ())
    with pytest.raises(StaleState, match="generation 1"):
        program.run(inputs, second, ())
    assert third.generation == 2


def test_a_state_of_another_kind_is_refused() -> None:
    device = bench.opened()
    program, inputs = bench.built(device, lambda x: x + 1), bench.step_inputs(torch.ones(2))
    with pytest.raises(StrictViolation, match="got tuple as state: pass the handle that was returned last"):
        program.prepare(inputs, ((torch.zeros(2),),), ())


def _attention() -> tuple[Any, Any, list[Any], Any]:
    """Device, kernel, arguments with the state at place 3, and the provider."""
    device = bench.opened()
    provider = next(p for p in device.providers() if p.op == "attention")
    case = next(c for c in CONTRACTS["attention"].samples(torch.float32) if c.instance.where == "decode")
    q, k, v, tree, batch = case.make()
    state = put_state(device, layout_of_sample(tree, batch), tree)
    return device, provider.build(case.instance), [q, k, v, state, provider.planner().plan(batch)], provider


def test_an_op_gives_a_new_handle_and_the_old_one_is_stale() -> None:
    _, kernel, arguments, _ = _attention()
    _, after = kernel(*arguments)
    assert after.generation == arguments[3].generation + 1
    with pytest.raises(StaleState, match=r"attention at decode uses generation 1 .* which attention at decode took"):
        kernel(*arguments)


def test_what_an_op_replaced_is_poisoned_and_the_rest_moves_on() -> None:
    _, kernel, arguments, _ = _attention()
    before = arguments[3].tree("the test")
    _, after = kernel(*arguments)
    other, replaced = before
    assert all(torch.isnan(part).all() for part in replaced)
    now = after.tree("the test")
    assert all(a is b for a, b in zip(now[0], other, strict=True))
    assert all(torch.isfinite(part).all() for part in now[1])


def test_a_step_that_keeps_an_old_tensor_reads_poison() -> None:
    """A kernel of the core's that held on to the pool would read this on a chip that reuses donated buffers."""
    _, kernel, arguments, _ = _attention()
    kept = arguments[3].tree("the test")[1][0]
    assert torch.isfinite(kept).all()
    out, _ = kernel(*arguments)
    assert torch.isnan(kept.sum())
    assert torch.isfinite(out).all()


def test_a_step_that_returns_the_state_it_was_given_is_refused() -> None:
    device, kernel, arguments, _ = _attention()

    def step(inputs: Any, state: Any, weights: Any) -> Any:
        q, k, v, plan = inputs.plans
        return kernel(q, k, v, state, plan)[0], state

    program = device.programs().build(step, bench.ANY)
    with pytest.raises(
        StaleState, match="the end of the step uses generation 0 of the state, which attention at decode"
    ):
        program.prepare(bench.step_inputs(*arguments[:3], arguments[4]), arguments[3], ())


def test_the_state_is_not_written_in_place() -> None:
    device = bench.opened()

    def step(inputs: Any, state: Any, weights: Any) -> Any:
        state.tree("a kernel")[0][1].index_put_((inputs.plans[0],), inputs.plans[1])
        return None, state

    program = device.programs().build(step, bench.ANY)
    inputs = bench.step_inputs(torch.tensor([1]), torch.ones(1))
    with pytest.raises(ForbiddenWrite, match=r"index_put_ changes state\[0\]\[1\]"):
        program.prepare(inputs, bench.fresh_state(device), ())


def test_memory_is_counted_and_given_back() -> None:
    device = bench.opened(memory_mib=16)
    free = device.memory().free
    held = device.zeros((1 << 20,), torch.float32)
    assert device.memory().free == free - (4 << 20)
    part = held[:8]
    del held
    assert device.memory().free == free - (4 << 20), "a part keeps the whole"
    del part
    assert device.memory().free == free
    with pytest.raises(OutOfDeviceMemory, match="16777216"):
        device.zeros((1 << 22, 2), torch.float32)
    pages = (16 << 20) // LAYOUT.page_bytes
    with pytest.raises(OutOfDeviceMemory, match="pages"):
        device.state_cache().allocate(LAYOUT, pages + 1)


def test_a_step_leaves_no_memory_behind() -> None:
    device, kernel, arguments, _ = _attention()
    before = device.memory().free
    state = arguments[3]
    for _ in range(5):
        _, state = kernel(*arguments[:3], state, arguments[4])
    arguments[3] = None
    assert device.memory().free >= before


def test_copies_are_copies() -> None:
    device, host = bench.opened(), torch.arange(4.0)
    there = device.to_device(host)
    host.zero_()
    back = device.to_host(there)
    there.add_(1)
    assert back.tolist() == [0.0, 1.0, 2.0, 3.0]
