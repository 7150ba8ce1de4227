"""Native routing of tokens to experts: the experts and weights that the reference chooses."""

from __future__ import annotations

import itertools

import pytest
import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.samples import run, specs
from hardpoint_platforms.reference.moe import build_moe_route
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

ROUTE = CONTRACTS["moe_route"]
SCORES = ("softmax", "sigmoid", "topk_softmax", "topk_sigmoid")


@pytest.fixture(params=("best", "baseline"))
def stage(request, library, stages):
    """Two threads, with the best variant that runs here and with the one that runs anywhere."""
    library.use(None if request.param == "best" else request.param)
    yield stages(2)
    library.use()


def route(stage, logits, bias, attrs):
    rows, count = logits.shape[0], attrs["top_k"]
    weights, ids = torch.empty(rows, count), torch.empty((rows, count), dtype=torch.int64)
    group = (attrs["groups"], attrs["top_groups"], ("max", "top2").index(attrs["group_score"]))
    shape = (attrs["experts"], count, SCORES.index(attrs["score"]), int(attrs["renormalize"]), *group, logits.stride(0))
    stage.call(Code.ROUTE, rows, (logits, bias, weights, ids), shape, (attrs["scale"],))
    return weights, ids


def check(found, wanted):
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[0], wanted[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("number", range(len(list(ROUTE.samples(torch.float32)))))
def test_contract_samples(stage, number):
    case = list(ROUTE.samples(torch.float32))[number]
    reference = next(p for p in reference_providers() if p.op == "moe_route")
    (logits,) = case.make()
    check(route(stage, logits, case.weights.get("bias"), case.instance.attrs), run(reference, case))


CASES = list(itertools.product(SCORES, (False, True), (False, True), ((1, 1), (8, 3)), ("max", "top2")))


@pytest.mark.parametrize(("score", "renormalize", "biased", "groups", "group_score"), CASES)
def test_random_logits(stage, score, renormalize, biased, groups, group_score):
    torch.manual_seed(1)
    experts, top_k = 64, 6
    logits = torch.randn(200, experts + 5)[:, :experts] * 2
    logits[:50] = logits[:50].round(decimals=1)  # equals
    logits[60] = -3.0
    bias = torch.randn(experts) * 0.2 if biased else None
    given = {"bias": bias} if biased else {}
    instance = ROUTE.instance(
        "test",
        torch.float32,
        specs(given, torch.float32),
        experts=experts,
        top_k=top_k,
        score=score,
        renormalize=renormalize,
        groups=groups[0],
        top_groups=groups[1],
        group_score=group_score,
        scale=1.5,
    )
    wanted = build_moe_route(instance)(logits, (bias,) if biased else ())
    check(route(stage, logits, bias, instance.attrs), wanted)


def test_rows_do_not_depend_on_batch_and_threads(stages, library):
    library.use()
    torch.manual_seed(2)
    logits = torch.randn(31, 128)
    attrs = ROUTE.instance("test", torch.float32, experts=128, top_k=8, renormalize=True).attrs
    together = route(stages(2), logits, None, attrs)
    for threads in (1, 3):
        for ours, theirs in zip(route(stages(threads), logits, None, attrs), together, strict=True):
            assert torch.equal(ours, theirs)
    for row in range(31):
        for ours, theirs in zip(route(stages(1), logits[row : row + 1], None, attrs), together, strict=True):
            assert torch.equal(ours[0], theirs[row])


def test_a_row_that_is_no_number_gives_experts_that_exist(stage):
    logits = torch.randn(3, 16)
    logits[0, 5], logits[1] = torch.nan, -torch.inf
    for score in SCORES:
        attrs = ROUTE.instance("test", torch.float32, experts=16, top_k=4, score=score).attrs
        weights, ids = route(stage, logits, None, attrs)
        assert ((ids >= 0) & (ids < 16)).all()
        assert weights[2].isfinite().all()
