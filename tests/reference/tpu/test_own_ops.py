"""The plugin's own ops against the contracts' references: Pallas interpreted, quantized products, experts, sampling."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax")

from hardpoint_tpu.plan import blocks_of

from hardpoint_platforms.conformance.execution import execute
from hardpoint_platforms.conformance.subject import oracle
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import SCHEMES
from hardpoint_platforms.quant import Codes
from hardpoint_platforms.reference.platform import ReferenceDevice

pytestmark = pytest.mark.reference


def sample_of(op: str, where: str, dtype: torch.dtype = torch.float32) -> Sample:
    return next(case for case in CONTRACTS[op].samples(dtype) if case.instance.where.endswith(where))


def provider_of(device: Any, op: str, name: str) -> Any:
    return next(p for p in device.providers() if (p.op, p.name) == (op, name))


def close(found: Any, wanted: Any, atol: float, rtol: float) -> None:
    if dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            close(getattr(found, field.name), getattr(wanted, field.name), atol, rtol)
    elif isinstance(wanted, tuple):
        for a, b in zip(found, wanted, strict=True):
            close(a, b, atol, rtol)
    elif isinstance(wanted, torch.Tensor):
        exact = not wanted.dtype.is_floating_point
        torch.testing.assert_close(found, wanted, atol=0 if exact else atol, rtol=0 if exact else rtol)
    else:
        assert found == wanted


def compare(device: Any, provider: Any, case: Sample) -> None:
    assert provider.supports(case.instance), provider.supports(case.instance).reason
    ours, theirs = execute(device, provider, case), execute(ReferenceDevice(), oracle(case.instance.op), case)
    tolerance = CONTRACTS[case.instance.op].tolerance[case.instance.dtype]
    close(ours.result, theirs.result, tolerance.atol, tolerance.rtol)
    close(ours.pages, theirs.pages, tolerance.atol, tolerance.rtol)


@pytest.mark.parametrize("where", ["decode", "mixed with padding"])
def test_pallas_attention_interpreted(device: Any, where: str) -> None:
    compare(device, provider_of(device, "attention", "pallas"), sample_of("attention", where))


def test_pallas_attention_with_every_rule(device: Any) -> None:
    """Sinks, a soft cap, slopes and a window that hides pages, all at once."""
    case = next(case for case in CONTRACTS["attention"].samples(torch.float32) if case.instance.attrs["sinks"])
    rules = {"softcap": 2.0, "alibi": (0.5, 0.25, 0.125, 0.0625), "window": 5}
    case = dataclasses.replace(
        case, instance=dataclasses.replace(case.instance, attrs={**case.instance.attrs, **rules})
    )
    compare(device, provider_of(device, "attention", "pallas"), case)


def test_pallas_says_which_heads_it_takes_on_a_chip(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = provider_of(device, "attention", "pallas")
    instance = sample_of("attention", "decode").instance
    assert "interpreted" in provider.supports(instance).reason
    monkeypatch.setattr(provider.runtime, "on_tpu", True)
    answer = provider.supports(instance)
    assert not answer
    assert "heads of 16 do not fill the 128 lanes" in answer.reason
    wide = dataclasses.replace(instance, attrs={**instance.attrs, "head_dim": 128, "v_head_dim": 256})
    assert provider.supports(wide)


@pytest.mark.parametrize(
    ("counts", "block"), [([1, 1, 1], 1), ([5, 0, 33, 1], 16), ([0, 0], 4), ([64], 32), ([3, 3, 3, 3], 2)]
)
def test_blocks_cover_every_token_once(counts: list[int], block: int) -> None:
    given = np.array(counts, np.int64)
    computed = np.arange(len(counts), dtype=np.int64) * 10
    work = blocks_of(given, computed, block, len(counts) + int(given.sum()) // block)
    seen = []
    for request, first, position, count in work.T[work[3] > 0].tolist():
        assert 0 < count <= block
        start = int(given[:request].sum())
        assert position == computed[request] + first - start
        assert start <= first < first + count <= start + counts[request]
        seen += range(first, first + count)
    assert seen == list(range(sum(counts)))


@pytest.mark.parametrize("name", list(SCHEMES))
def test_quantized_linear(device: Any, name: str) -> None:
    case = sample_of("linear", name)
    provider = provider_of(device, "linear", "quantized")
    scheme = SCHEMES[name]
    assert ("whole-number" in provider.supports(case.instance).reason) == (name in ("fp8", "int8"))
    ours, theirs = execute(device, provider, case), execute(ReferenceDevice(), oracle("linear"), case)
    # float8 codes of the input may differ where a division rounds otherwise
    slack = 20 if scheme.rounding is not None and scheme.rounding.codes is Codes.FLOAT8 else 1
    tolerance = CONTRACTS["linear"].tolerance[torch.float32]
    close(ours.result, theirs.result, slack * tolerance.atol, slack * tolerance.rtol)
    packed = provider.pack(case.instance, {n: _there(device, w) for n, w in case.weights.items()})
    held = sum(provider.packed_bytes(packed).values())
    rows, columns = case.instance.weights["weight"].shape
    assert held < rows * columns * 4 * 0.45, "kept as numbers, not as codes"


def _there(device: Any, weight: Any) -> Any:
    from hardpoint_platforms.trees import mapped

    return mapped(weight, device.to_device)


def test_quantized_logits(device: Any) -> None:
    compare(device, provider_of(device, "logits", "quantized"), sample_of("logits", "q4_k"))


@pytest.mark.parametrize("case", CONTRACTS["experts"].samples(torch.float32), ids=lambda case: case.instance.where)
def test_ragged_experts(device: Any, case: Sample) -> None:
    compare(device, provider_of(device, "experts", "ragged"), case)


@pytest.mark.parametrize(
    "where", ["all filters", "penalties", "more log-probabilities than tokens", "large vocabulary"]
)
def test_sampling(device: Any, where: str) -> None:
    compare(device, provider_of(device, "sample", "sorted"), sample_of("sample", where))
