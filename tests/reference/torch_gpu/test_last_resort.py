"""Heads wider than the kernels take: torch's own function, and never a graph of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hardpoint_torch_gpu import last_resort
from hardpoint_torch_gpu.attention import WIDEST, TritonAttention
from hardpoint_torch_gpu.last_resort import GpuSdpa
from hardpoint_torch_gpu.plan import GpuPlanner
from hardpoint_torch_gpu.seams import Seam

from hardpoint_platforms.ops.attention import _case, _Shape
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import PagedRows, run
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

REFERENCE = next(provider for provider in reference_providers() if provider.op == "attention")


def samples() -> Iterator[Sample]:
    shape = _Shape(heads=4, kv_heads=2, head_dim=2 * WIDEST, v_head_dim=2 * WIDEST)
    yield _case(torch.float32, "prompts", PagedRows(((0, 5), (0, 3))), shape)
    yield _case(torch.float32, "mixed", PagedRows(((7, 1), (2, 6), (0, 4))), shape)
    yield _case(torch.float32, "decodes", PagedRows(((40, 1), (3, 1), (0, 1))), shape)


@pytest.mark.parametrize("case", list(samples()), ids=lambda case: case.instance.where)
def test_wide_heads(case: Sample) -> None:
    device = ReferenceDevice()
    assert not TritonAttention(GpuPlanner(device.upload)).supports(case.instance)
    provider = GpuSdpa(device.to_device)
    assert "op by op" in provider.supports(case.instance).reason
    (ours, state), (theirs, wanted) = run(provider, case), run(REFERENCE, case)
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)
    for part, expected in zip(state[1], wanted[1], strict=True):
        assert torch.equal(part[1:], expected[1:])


def test_it_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    case = list(samples())[2]
    monkeypatch.setattr(last_resort, "_recorded", lambda x: True)
    with pytest.raises(RuntimeError, match="planned on the host"):
        run(GpuSdpa(ReferenceDevice().to_device), case)


def test_nor_in_pieces() -> None:
    class Cut(Seam):
        def cut(self, call: object) -> None:
            raise AssertionError("nothing may be put off")

    instance = replace(list(samples())[2].instance, where="layers.3.self_attn")
    q = torch.zeros(1, 4, 2 * WIDEST)
    with pytest.raises(RuntimeError, match=r"layers\.3"):
        GpuSdpa(ReferenceDevice().to_device).build(instance)(q, q[:, :2], q[:, :2], ((q, q),), Cut())


def test_alibi_is_left_to_the_reference() -> None:
    case = next(iter(CONTRACTS["attention"].samples(torch.float32)))
    instance = replace(case.instance, attrs={**case.instance.attrs, "alibi": True})
    assert not GpuSdpa(ReferenceDevice().to_device).supports(instance)
