"""The Triton kernels against the contracts' samples: each agrees with the reference within the tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu.leaves import leaves
from hardpoint_torch_gpu.providers import triton_providers

from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the conformance kit runs these"),
]

#: The interpreter multiplies the bits of bfloat16 as if they were integers: that dtype is tested on a GPU.
DTYPES = (torch.float32, torch.float16)
#: Seconds per sample there.
SLOW = ("attention", "sample", "logprobs", "verify", "norm", "add_norm", "gated_activation")
REFERENCE = {provider.op: provider for provider in reference_providers()}
#: Blocks have tests of their own: no provider takes all of their samples.
PROVIDERS = {one.op: one for one in triton_providers(ReferenceDevice()) if one.op in REFERENCE}


def samples() -> Iterator[Any]:
    for op in PROVIDERS:
        for dtype in DTYPES[:1] if op in SLOW else DTYPES:
            for case in CONTRACTS[op].samples(dtype):
                yield pytest.param(op, case, id=f"{op}-{str(dtype).removeprefix('torch.')}-{case.instance.where}")


@pytest.mark.parametrize(("op", "case"), samples())
def test_agrees_with_the_reference(op: str, case: Sample) -> None:
    answer = ask(CONTRACTS[op], PROVIDERS[op], case.instance)
    assert answer, answer.reason
    with torch.inference_mode():
        found, wanted = run(PROVIDERS[op], case), run(REFERENCE[op], case)
    tolerance = CONTRACTS[op].tolerance[case.instance.dtype]
    if op == "sample":  # the reference does not say whether logits are finite
        found, wanted = found.token_ids, wanted.token_ids
    pairs = list(zip(leaves(found), leaves(wanted), strict=True))
    assert pairs
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance.atol, rtol=tolerance.rtol)
