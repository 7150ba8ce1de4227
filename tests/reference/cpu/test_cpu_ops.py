"""The processor's kernels against the contracts' samples: each agrees with the reference within the tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hardpoint_cpu.ops.providers import cpu_providers
from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROVIDERS = {provider.op: provider for provider in cpu_providers()}
REFERENCE = {provider.op: provider for provider in reference_providers()}
#: What is left to the reference, by a word of the sample's name or the activation's.
LEFT = ("alibi", "l2", "limit and offset", "gelu_quick", "relu2", "sigmoid", "tanh", "softplus")


def samples() -> Iterator[Any]:
    for op in PROVIDERS:
        for dtype in DTYPES:
            for case in CONTRACTS[op].samples(dtype):
                yield pytest.param(op, case, id=f"{op}-{str(dtype).removeprefix('torch.')}-{case.instance.where}")


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree:
            yield from tensors(part)


def compare(op: str, case: Sample, provider: OpProvider) -> None:
    with torch.inference_mode():
        found, wanted = run(provider, case), run(REFERENCE[op], case)
    tolerance = CONTRACTS[op].tolerance[case.instance.dtype]
    pairs = list(zip(tensors(found), tensors(wanted), strict=True))
    assert pairs
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize(("op", "case"), samples())
def test_agrees_with_the_reference(op: str, case: Sample) -> None:
    provider = PROVIDERS[op]
    answer = ask(CONTRACTS[op], provider, case.instance)
    if not answer:
        assert any(word in case.instance.where for word in LEFT), answer.reason
        assert answer.reason
        return
    compare(op, case, provider)
