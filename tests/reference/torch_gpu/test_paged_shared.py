"""Attention of rows that share pages: agrees with the reference, and with rows that read for themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu import attention, sharing
from hardpoint_torch_gpu import plan as plans
from hardpoint_torch_gpu.attention import TritonAttention
from hardpoint_torch_gpu.kernels import paged_decode, paged_shared
from hardpoint_torch_gpu.kernels.paged_prefill import Shape
from hardpoint_torch_gpu.limits import ELSEWHERE
from hardpoint_torch_gpu.plan import GpuPlanner
from shared_rows import SharedRows

from hardpoint_platforms.ops.attention import _case, _Shape, alibi_slopes
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host"),
]

REFERENCE = {provider.op: provider for provider in reference_providers()}["attention"]
FEW = SharedRows(((3, (1, 2, 9, 4, 17)), (0, (7,)), (0, (30,))))


def case(rows: Any, *shape: int, dtype: torch.dtype = torch.float32, **attrs: Any) -> Sample:
    return _case(dtype, "shared", rows, _Shape(*shape) if shape else _Shape(), **attrs)


CASES = {
    "two rows, one page": case(SharedRows(((1, (1, 5)),))),
    "five and two alone": case(FEW),
    "forty": case(SharedRows(((2, tuple(1 + n % 6 for n in range(40))),)), 4, 1, 16, 16),
    "several groups, padding": case(SharedRows(((5, (1, 8, 3)), (2, (4, 4)), (9, (2, 1, 1))), extra=3, width=20)),
    "one head per head of keys": case(FEW, 2, 2, 16, 16),
    "seven": case(FEW, 7, 1, 16, 16),
    "eight, tiles of eight": case(SharedRows(((2, tuple(range(1, 12))),)), 8, 1, 16, 16),
    "odd sizes": case(FEW, 6, 2, 20, 12),
    "softcap": case(FEW, softcap=2.0),
    "sinks": case(FEW, sinks=True),
    "rows in parts": case(SharedRows(((2, (900, 1)),), page_tokens=16), 2, 1, 16, 16, sinks=True),
    "16 bits, many units": case(SharedRows(((20, (1, 40, 5)),), page_tokens=16), dtype=torch.float16),
    "pages of 8": case(SharedRows(((9, (3, 1)),), page_tokens=8), dtype=torch.float16),
    "beside prompts": case(replace(FEW, prompts=(9, 5), extra=2)),
}

#: Units of the launch where there are several.
UNITS = {
    "forty": 3, "several groups, padding": 3, "16 bits, many units": 5, "eight, tiles of eight": 2, "pages of 8": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "WORTH", 0)
    monkeypatch.setattr(sharing, "LEAST_KEYS", 64)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Units of each launch."""
    noted: list[int] = []

    def attend(*given: Any) -> Any:
        units = given[5].units
        noted.append(int((units[:, 0] > 0).sum()))
        return paged_shared.attend_shared(*given)

    monkeypatch.setattr(paged_decode, "attend_shared", attend)
    return noted


def provider(sample: Sample) -> TritonAttention:
    """One whose planner knows the op: it is built before the first step is planned."""
    made = TritonAttention(GpuPlanner(ReferenceDevice().upload))
    made.build(sample.instance)
    return made


def compare(sample: Sample) -> None:
    real = sample.make()[-1].num_tokens
    with torch.inference_mode():
        (found, state), (wanted, kept) = run(provider(sample), sample), run(REFERENCE, sample)
    tolerance = CONTRACTS["attention"].tolerance[sample.instance.dtype]
    torch.testing.assert_close(found[:real], wanted[:real], atol=tolerance.atol, rtol=tolerance.rtol)
    assert found.isfinite().all()
    for mine, theirs in zip(state[1], kept[1], strict=True):
        assert torch.equal(mine[1:], theirs[1:])


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str, launched: list[int]) -> None:
    compare(CASES[name])
    assert launched == [UNITS.get(name, 1)]


@pytest.mark.parametrize("shape", [Shape(16, 16, 4, 1), Shape(128, 64, 4, 2)])
def test_tiles_in_pieces_compute_the_same(shape: Shape, launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_shared, "shape_for", lambda *given: shape)
    compare(CASES["eight, tiles of eight"])
    assert launched


def test_rows_that_read_for_themselves_get_the_same() -> None:
    sample = CASES["several groups, padding"]
    ours, alone = provider(sample), TritonAttention(GpuPlanner(ReferenceDevice().upload))
    with torch.inference_mode():
        (found, _), (wanted, _) = run(ours, sample), run(alone, sample)
    torch.testing.assert_close(found[:8], wanted[:8], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("attrs", [{"window": 5}, {"alibi": alibi_slopes(4)}])
def test_scores_by_distance_share_nothing(attrs: dict[str, Any], launched: list[int]) -> None:
    sample = case(FEW, **attrs)
    compare(sample)
    assert not launched
    assert "share" not in provider(sample).supports(sample.instance).reason
    assert "pages that decodes share" in provider(CASES["sinks"]).supports(CASES["sinks"].instance).reason


def test_layers_with_a_window_read_for_themselves_beside_others(launched: list[int]) -> None:
    """Of one cache group, one plan for both."""
    plain, window = case(FEW), case(FEW, window=5)
    ours = provider(plain)
    with torch.inference_mode():
        for sample in (window, plain):
            found, wanted = run(ours, sample)[0], run(REFERENCE, sample)[0]
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    assert len(launched) == 1


def test_blocks_end_with_units() -> None:
    for width in (64, 128, 256):
        for dtype in (torch.float32, torch.bfloat16):
            shape = paged_shared.shape_for(ELSEWHERE, width, width, dtype)
            assert sharing.STEP % shape.block == 0
            assert shape.queries >= 16
    assert paged_shared.shape_for(ELSEWHERE, 128, 128, torch.bfloat16) == Shape(64, 64, 4, 2)


def test_what_a_cached_token_takes_is_told_to_the_planner() -> None:
    sample = case(FEW, 6, 2, 20, 12)
    assert attention._sizes(sample.instance) == (3, 2 * 32 * 4)
