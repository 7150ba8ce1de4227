"""Memory, transfers, routines and state of the device; lowerings that torchax lacks."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax")

from hardpoint_tpu.program import UnplannedProgram, XlaBuilder
from hardpoint_tpu.state import StaleState

from hardpoint_platforms.capabilities import ExecutionMode
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.program import Bucket, SamplingShape
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, CanonicalPages, LayerCache

pytestmark = pytest.mark.reference

LAYOUT = CacheLayout((CacheGroup((0, 1)),), (LayerCache((("k", 2, 8), ("v", 2, 4))),) * 2, 4, torch.float32)


def test_what_it_says_of_itself(device: Any) -> None:
    facts = device.capabilities()
    assert facts.mode is ExecutionMode.COMPILE
    assert facts.functional_state
    assert not facts.verified
    assert "no TPU" in device.info.name
    assert device.torch_device.type == "jax"


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8,
        torch.bool, torch.float8_e4m3fn,
    ],
)  # fmt: skip
def test_bits_survive_the_way_there_and_back(device: Any, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 100, (5, 3)).to(dtype)
    there = device.to_device(bits)
    assert there.dtype is dtype
    assert there.shape == (5, 3)
    back = device.to_host(there)
    assert torch.equal(back.view(torch.uint8), bits.view(torch.uint8))
    assert torch.equal(device.to_host(there[1:4, :2]).view(torch.uint8), bits[1:4, :2].contiguous().view(torch.uint8))


def test_numbers_of_64_bits_stay_so(device: Any) -> None:
    seeds = torch.tensor([2**62 + 3, -(2**40), 7])
    assert device.to_host(device.to_device(seeds) + 1).tolist() == (seeds + 1).tolist()


def test_a_read_back_keeps_its_value(device: Any) -> None:
    bump = device.routine(lambda x: x.add_(1.0), replaces=(0,))
    x = device.to_device(torch.zeros(3))
    coming = device.read_back((x,))
    x = bump(x)
    assert coming.wait()[0].tolist() == [0.0, 0.0, 0.0]
    assert device.to_host(x).tolist() == [1.0, 1.0, 1.0]


def test_a_routine_takes_its_argument(device: Any) -> None:
    store = device.routine(lambda table, rows, at, new: table.index_put_((rows, at), new), replaces=(0,))
    table = device.zeros((3, 4), torch.int32)
    there = device.upload([torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([5, 6], dtype=torch.int32)])
    after = store(table, *there)
    assert device.to_host(after).tolist() == [[0, 5, 0, 0], [0, 0, 0, 0], [0, 0, 0, 6]]
    assert table._elem.is_deleted()
    compiled = device._runtime.compiles.count
    store(after, *there)
    assert device._runtime.compiles.count == compiled


def test_a_static_argument_makes_another_program(device: Any) -> None:
    scaled = device.routine(lambda tree, factor: tuple(x * factor for x in tree))
    x = device.to_device(torch.ones(2))
    assert device.to_host(scaled((x, x), 2.0)[1]).tolist() == [2.0, 2.0]
    assert device.to_host(scaled((x, x), 3.0)[0]).tolist() == [3.0, 3.0]


def test_a_handle_dies_when_it_is_taken(device: Any) -> None:
    cache = device.state_cache()
    first = cache.allocate(LAYOUT, 6)
    second = cache.copy_pages(first, [1], [2])
    with pytest.raises(StaleState, match="export_pages uses a state that copy_pages took"):
        cache.export_pages(first, LAYOUT, [1])
    cache.export_pages(second, LAYOUT, [1])
    with pytest.raises(StaleState, match="got tuple as state"):
        cache.copy_pages((), [1], [2])


def test_more_pages_than_one_program_moves(device: Any) -> None:
    cache, count = device.state_cache(), 37
    tree = tuple(tuple(torch.randn(count, 4, heads, width) for _, heads, width in layer.parts) for layer in LAYOUT.pool)
    ids = list(range(1, count + 1))
    state = cache.import_pages(cache.allocate(LAYOUT, count + 2), ids, CanonicalPages(LAYOUT, tuple(ids), tree))
    state = cache.copy_pages(state, ids[:18], ids[18:36])
    for layer, wanted in zip(cache.export_pages(state, LAYOUT, ids).data, tree, strict=True):
        for found, part in zip(layer, wanted, strict=True):
            assert torch.equal(found, torch.cat((part[:18], part[:18], part[36:])))
    zeros = cache.export_pages(state, LAYOUT, [0]).data[0][0]
    assert torch.equal(zeros, torch.zeros_like(zeros))


def test_too_much_memory(device: Any) -> None:
    with pytest.raises(OutOfDeviceMemory, match="bytes wanted"):
        device.zeros((1 << 50,), torch.uint8)
    gc.collect()
    before = device.memory()
    kept = device.zeros((1 << 24,), torch.float32)
    assert before.free - device.memory().free >= kept.numel() * 4


def test_nothing_is_built_after_seal(device: Any) -> None:
    builder = device.programs()
    program = builder.build(lambda *_: None, Bucket(1, 1, 1, SamplingShape.FULL))
    with pytest.raises(UnplannedProgram, match="before it was prepared"):
        program.run(None, None, ())
    builder.seal()
    with pytest.raises(UnplannedProgram, match="is built after serving began"):
        builder.build(lambda *_: None, Bucket(1, 1, 1, SamplingShape.FULL))
    late = device.late_compiles
    device.routine(lambda x: x * 3.5)(device.to_device(torch.ones(3, 7)))
    assert device.late_compiles > late
    device.programs()


def test_buckets(device: Any) -> None:
    limits, shapes = device.capabilities().limits, (SamplingShape.GREEDY, SamplingShape.FULL)
    builder = XlaBuilder(limits, device._runtime, 4, shapes)
    sizes = [(bucket.tokens, bucket.requests, bucket.query) for bucket in builder.buckets(100, 6)]
    assert sizes[::2] == [(1, 1, 1), (6, 6, 1), (16, 1, 0), (100, 1, 0)]
    assert sizes[::2] == sizes[1::2]


def test_lowerings_equal_torch(device: Any) -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 6, (4, 9))).float()
    ordered, wanted = x.sort(-1).values, x[:, :5].contiguous()
    a, b, c = device.upload([x, ordered, wanted])

    def body(x: torch.Tensor, ordered: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        down = x.sort(dim=-1, descending=True, stable=True)
        top = x.topk(3, -1)
        left, right = torch.searchsorted(ordered, wanted), torch.searchsorted(ordered, wanted, right=True)
        return down.values, down.indices, top.values, left, right, x.unflatten(1, (3, 3)).sum(-1)

    for found, right in zip(device.routine(body)(a, b, c), body(x, ordered, wanted), strict=True):
        assert found.dtype is right.dtype
        assert torch.equal(device.to_host(found), right)
