"""Products of weights in blocks: the contract's samples, and rows that do not know their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hardpoint_cpu.ops.blocked import has_blocks
from hardpoint_cpu.ops.dense import CpuLinear, CpuLogits
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample, WeightSpec
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(not has_blocks(), reason="this build of torch has no blocked products"),
]

REFERENCE = {provider.op: provider for provider in reference_providers()}
BLOCKED = {"linear": CpuLinear(blocked=True), "logits": CpuLogits(blocked=True)}


def samples() -> Iterator[Any]:
    for op in BLOCKED:
        for case in CONTRACTS[op].samples(torch.float32):
            yield pytest.param(op, case, id=f"{op}-{case.instance.where}")


@pytest.mark.parametrize(("op", "case"), samples())
def test_agrees_with_the_reference(op: str, case: Sample) -> None:
    with torch.inference_mode():
        found, wanted = run(BLOCKED[op], case), run(REFERENCE[op], case)
    tolerance = CONTRACTS[op].tolerance[torch.float32]
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


def kernel_of(rows: int, columns: int) -> Any:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    spec = {"weight": WeightSpec((rows, columns), torch.float32)}
    instance = CONTRACTS["linear"].instance(
        "here", torch.float32, spec, in_features=columns, out_features=rows, bias=False
    )
    provider = BLOCKED["linear"]
    kernel, packed = provider.build(instance), provider.pack(instance, {"weight": weight})
    assert provider.packed_bytes(packed) == {(False, id(packed[0])): weight.nbytes}
    return lambda x: kernel(x, packed)


@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (7, 5), (1, 3), (576, 1536)])
def test_a_row_alone_equals_the_row_in_a_batch(rows: int, columns: int) -> None:
    product = kernel_of(rows, columns)
    x = torch.randn(37, columns, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        whole = product(x)
        for count in (1, 2, 3, 8, 16, 21):
            assert torch.equal(product(x[:count]), whole[:count])
        assert product(x[:0]).shape == (0, rows)
        assert torch.equal(product(x.repeat(1, 2)[:, :columns]), whole)


def test_half_precision_stays_row_major() -> None:
    provider = CpuLinear(blocked=True)
    for case in CONTRACTS["linear"].samples(torch.bfloat16):
        assert "blocked" not in provider.supports(case.instance).reason


def test_a_head_that_may_be_the_embedding_is_not_copied() -> None:
    spec = {"weight": WeightSpec((8, 4), torch.float32)}
    instance = CONTRACTS["logits"].instance("here", torch.float32, spec)
    weight = torch.ones(8, 4)
    assert BLOCKED["logits"].pack(instance, {"weight": weight})[0].data_ptr() == weight.data_ptr()
