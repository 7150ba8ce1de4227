"""Choosing experts in Triton beyond the contract's samples: ties, odd groups, numbers that are none, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hardpoint_torch_gpu.routing import TritonRoute

from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance
from hardpoint_platforms.ops.samples import specs
from hardpoint_platforms.reference.moe import build_moe_route

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host"),
]

ROUTE = CONTRACTS["moe_route"]
SCORES = ("softmax", "sigmoid", "topk_softmax", "topk_sigmoid")
NOTHING = -torch.inf


def instance(bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float32, **attrs: Any) -> OpInstance:
    return ROUTE.instance("here", dtype, specs({} if bias is None else {"bias": bias}, dtype), **attrs)


def check(logits: torch.Tensor, bias: torch.Tensor | None = None, **attrs: Any) -> torch.Tensor:
    """Both agree, also on what is no number; the ids."""
    asked = instance(bias, logits.dtype, **attrs)
    assert ask(ROUTE, TritonRoute(), asked)
    w = () if bias is None else (bias,)
    found: tuple[torch.Tensor, torch.Tensor] = TritonRoute().build(asked)(logits, w)
    weights, ids = found
    wanted = build_moe_route(asked)(logits, w)
    assert weights.dtype == torch.float32
    assert torch.equal(ids, wanted[1])
    torch.testing.assert_close(weights, wanted[0], atol=1e-6, rtol=1e-5, equal_nan=True)
    return ids


CASES: tuple[dict[str, Any], ...] = (
    {"score": "softmax", "renormalize": True},
    {"score": "sigmoid", "groups": 3, "top_groups": 2, "group_score": "top2", "renormalize": True},
    {"score": "softmax", "groups": 4, "top_groups": 3, "scale": 16.0},
    {"score": "sigmoid", "groups": 6, "top_groups": 1, "renormalize": True, "scale": 2.5},
    {"score": "softmax", "groups": 12, "top_groups": 5, "group_score": "top2"},
    # Neither groups nor renormalizing touch the weights of the chosen ones.
    {"score": "topk_softmax", "groups": 4, "top_groups": 1, "renormalize": True},
    {"score": "topk_sigmoid", "renormalize": True, "scale": 1.5},
)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_with_equals(case: dict[str, Any], biased: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 65, generator=generator)[:, :60] * 2  # rows that do not touch
    logits[:6] = logits[:6].round(decimals=0)
    logits[6] = -3.0
    bias = torch.randn(60, generator=generator).round(decimals=1) if biased else None
    check(logits, bias, experts=60, top_k=5, **case)


@pytest.mark.parametrize("score", SCORES)
def test_of_equals_the_first(score: str) -> None:
    logits = torch.tensor([[0.0, -0.0, 0.0, 1.0, -0.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]])
    ids = check(logits, experts=6, top_k=4, score=score)
    assert ids.tolist() == [[3, 5, 0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize("group_score", ["max", "top2"])
def test_of_equal_groups_the_first(group_score: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 3.0, 2.0, 2.0, 3.0], [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]])
    attrs: dict[str, Any] = {"groups": 4, "top_groups": 2, "group_score": group_score, "score": "sigmoid"}
    ids = check(logits, experts=8, top_k=3, **attrs)
    assert ids.tolist() == [[3, 4, 2], [0, 4, 1]]


def test_more_experts_than_the_good_groups_have() -> None:
    logits = torch.arange(16.0).flip(0)[None].roll(5, 1)
    ids = check(logits, experts=16, top_k=6, groups=8, top_groups=2, score="sigmoid")
    assert ids[0, 4:].tolist() == [0, 1]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("score", SCORES)
def test_logits_that_are_no_numbers(score: str, groups: int) -> None:
    logits = torch.linspace(-2, 2, 12).repeat(6, 1)
    logits[0, 5] = torch.nan
    logits[1, 2:] = NOTHING
    logits[2] = NOTHING
    logits[3, 7] = torch.inf
    logits[4] = torch.nan
    logits[5, 3], logits[5, 8] = torch.nan, NOTHING
    ids = check(logits, experts=12, top_k=4, score=score, groups=groups, top_groups=2, group_score="top2")
    assert ids.min() >= 0
    assert ids.max() < 12


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_logits_that_are_large(score: str) -> None:
    logits = torch.tensor([[90.0, 95.0, -200.0, 89.0], [-90.0, -300.0, -80.0, -95.0]])
    check(logits, experts=4, top_k=3, score=score, renormalize=True)


@pytest.mark.parametrize(
    ("experts", "top_k", "dtype"), [(512, 10, torch.float16), (1024, 32, torch.float32), (1, 1, torch.float32)]
)
def test_sizes(experts: int, top_k: int, dtype: torch.dtype) -> None:
    logits = torch.randn(2, experts, generator=torch.Generator().manual_seed(4)).to(dtype)
    check(logits, experts=experts, top_k=top_k, score="softmax", renormalize=True)


def test_no_tokens() -> None:
    weights, ids = TritonRoute().build(instance(experts=8, top_k=2))(torch.empty(0, 8))
    assert weights.shape == ids.shape == (0, 2)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("attrs", "reason"),
    [
        ({"experts": 8, "top_k": 9}, "9 of 8 experts"),
        ({"experts": 64, "top_k": 33}, "up to 32"),
        ({"experts": 2048, "top_k": 2}, "holds 1024"),
        ({"experts": 9, "top_k": 2, "groups": 2}, "not equal groups"),
        ({"experts": 128, "top_k": 2, "groups": 64}, "up to 32"),
        ({"experts": 8, "top_k": 2, "groups": 8, "top_groups": 2, "group_score": "top2"}, "no best two"),
        ({"experts": 528, "top_k": 2, "groups": 16}, None),
        ({"experts": 561, "top_k": 2, "groups": 17}, "holds 1024"),
    ],
)
def test_what_it_does_not_take(attrs: dict[str, Any], reason: str | None) -> None:
    answer = TritonRoute().supports(instance(**attrs))
    assert bool(answer) == (reason is None)
    assert reason is None or reason in answer.reason


def test_groups_that_change_nothing_are_no_reason() -> None:
    assert TritonRoute().supports(instance(experts=9, top_k=2, groups=2, score="topk_softmax"))
    check(torch.arange(8.0)[None], experts=8, top_k=8, groups=4, top_groups=4)
