"""Adapters in Triton beyond the contract's samples: several blocks and shares, views, foreign numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hardpoint_torch_gpu.adapters import TritonLora
from hardpoint_torch_gpu.kernels.lora import cutting
from hardpoint_torch_gpu.limits import ELSEWHERE, limits_for

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance
from hardpoint_platforms.ops.samples import SCHEMES, specs

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host"),
]

LORA = CONTRACTS["lora"]
Weights = dict[str, torch.Tensor]


def weights_of(k: int, n: int, rank: int, slots: int = 3, dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(k + rank)
    a, b = torch.randn(slots, rank, k, generator=generator), torch.randn(slots, n, rank, generator=generator)
    return {"a": (a * k**-0.5).to(dtype), "b": (b * rank**-0.5).to(dtype)}


def instance(weights: Weights) -> OpInstance:
    (slots, rank, k), n, dtype = weights["a"].shape, weights["b"].shape[1], weights["a"].dtype
    return LORA.instance(
        "here", dtype, specs(weights, dtype), in_features=k, out_features=n, rank=rank, slots=slots
    )  # fmt: skip


def lora(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, weights: Weights) -> torch.Tensor:
    provider, asked = TritonLora(), instance(weights)
    found: torch.Tensor = provider.build(asked)(y, x, slots, provider.pack(asked, weights))
    return found


def exact(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, weights: Weights) -> torch.Tensor:
    out = y.double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            h = weights["a"][slot].double() @ x[row].double()
            out[row] += weights["b"][slot].double() @ h.to(x.dtype).double()
    return out


def numbers(tokens: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("tokens", "k", "n", "rank", "dtype"),
    [
        (21, 1100, 130, 70, torch.float16),  # two shares of the columns, two steps of ranks, three tiles of rows
        (131, 256, 140, 16, torch.float16),  # large blocks
        (131, 40, 70, 3, torch.float32),
        (130, 5120, 20, 16, torch.float16),  # ten shares, joined before they go up
        (18, 1024, 16, 40, torch.float32),
        (3, 1, 1, 1, torch.float32),
    ],
)
def test_shapes(tokens: int, k: int, n: int, rank: int, dtype: torch.dtype) -> None:
    weights, x, y = weights_of(k, n, rank, 4, dtype), numbers(tokens, k, dtype), numbers(tokens, n, dtype, 2)
    slots = torch.randint(-1, 4, (tokens,), generator=torch.Generator().manual_seed(5))
    before = y.clone()
    found = lora(y, x, slots, weights)
    tolerance = LORA.tolerance[dtype]
    wanted = exact(before, x, slots, weights).to(dtype)
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)
    assert torch.equal(found[slots < 0], before[slots < 0])


def test_views_are_read_and_written_where_they_lie() -> None:
    weights, slots = weights_of(32, 24, 4), torch.tensor([0, 9, 2, 9, -1, 9])[::2]
    wide, x = numbers(3, 60), numbers(3, 40)[:, :32]
    before = wide.clone()
    found = lora(wide[:, 20:44], x, slots, weights)
    assert found.data_ptr() == wide[:, 20:44].data_ptr()
    torch.testing.assert_close(found, exact(before[:, 20:44], x, slots, weights).float(), atol=2e-5, rtol=1e-4)
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 44:], before[:, 44:])
    turned = before[:, 20:44].t().contiguous().t()
    assert torch.equal(lora(turned, x, slots, weights), found)


def test_no_number_reaches_a_token_of_another_adapter() -> None:
    weights, x, y = weights_of(64, 24, 4), numbers(5, 64), numbers(5, 24, seed=2)
    slots = torch.tensor([0, 1, 2, -1, 0])
    sound = lora(y.clone(), x, slots, weights)
    for name in weights:
        weights[name][1] = torch.nan
    x[2], x[3] = torch.inf, torch.nan
    found = lora(y.clone(), x, slots, weights)
    alone = torch.tensor([0, 3, 4])
    assert torch.equal(found[alone], sound[alone])
    assert found[1].isnan().all()


@pytest.mark.parametrize("slots", [[-1, -1, -1], [3, 1 << 40, -7]])
def test_without_an_adapter_nothing_changes(slots: list[int]) -> None:
    y, x = numbers(3, 24), torch.full((3, 32), torch.nan)
    assert torch.equal(lora(y.clone(), x, torch.tensor(slots), weights_of(32, 24, 4)), y)


def test_no_tokens() -> None:
    found = lora(torch.empty(0, 24), torch.empty(0, 32), torch.empty(0, dtype=torch.int64), weights_of(32, 24, 4))
    assert found.shape == (0, 24)


def test_what_it_says() -> None:
    asked = instance(weights_of(256, 24, 4))
    assert TritonLora().supports(asked).reason == "in place, two launches or three"
    held = {name: replace(spec, scheme=SCHEMES["q8_0"]) for name, spec in asked.weights.items()}
    assert TritonLora().supports(replace(asked, weights=held)).reason.endswith("; q8_0 dequantized at load")
    assert "float64" in TritonLora().supports(replace(asked, dtype=torch.float64)).reason


@pytest.mark.parametrize("tokens", [1, 128, 129, 2048, 100_000])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("columns", [1, 576, 4096, 14336])
def test_shares_cover_the_columns_and_none_is_empty(columns: int, itemsize: int, tokens: int) -> None:
    for limits in (ELSEWHERE, limits_for("hip", "gfx1100", 32, 65536)):
        cut = cutting(tokens, columns, 64, itemsize, limits)
        share = cut.steps * cut.columns
        assert share * (cut.splits - 1) < columns <= share * cut.splits
        assert cut.splits == 1 or share >= 512
