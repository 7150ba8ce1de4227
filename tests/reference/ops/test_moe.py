"""Routing and experts against float64, one token and one expert at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.samples import Source, quantized, run, specs
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, QuantTensor, Rounding, round_input
from hardpoint_platforms.reference.moe import build_experts
from hardpoint_platforms.strict.static.moe import build_experts as static_experts

pytestmark = pytest.mark.reference

DTYPES = (torch.float32, torch.bfloat16)
FUNCTIONS = {
    "silu": F.silu,
    "relu2": lambda x: F.relu(x) ** 2,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def _route(logits, bias, attrs):
    """The choice of one token, spelled with Python's sort."""
    score, k = attrs["score"], attrs["top_k"]
    if score.startswith("topk"):
        best = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:k]
        chosen = torch.stack([logits[e] for e in best])
        return (chosen.softmax(0) if score == "topk_softmax" else chosen.sigmoid()) * attrs["scale"], best
    scores = logits.softmax(0) if score == "softmax" else logits.sigmoid()
    choice = scores + bias
    allowed = range(len(logits))
    if attrs["groups"] > 1:
        size = len(logits) // attrs["groups"]
        groups = [sorted(choice[g * size : (g + 1) * size].tolist(), reverse=True) for g in range(attrs["groups"])]
        quality = [g[0] if attrs["group_score"] == "max" else g[0] + g[1] for g in groups]
        kept = sorted(range(len(groups)), key=lambda g: (-quality[g], g))[: attrs["top_groups"]]
        allowed = [e for e in allowed if e // size in kept]
    best = sorted(allowed, key=lambda e: (-choice[e], e))[:k]
    weights = torch.stack([scores[e] for e in best])
    if attrs["renormalize"]:
        weights = weights / weights.sum()
    return weights * attrs["scale"], best


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_route(dtype, providers, close):
    contract = CONTRACTS["moe_route"]
    for case in contract.samples(dtype):
        (logits,) = case.make()
        weights, ids = run(providers["moe_route"], case)
        assert weights.dtype == torch.float32
        assert ids.dtype == torch.int64
        bias = case.weights.get("bias", torch.zeros(logits.shape[1])).double()
        for token in range(logits.shape[0]):
            expected, best = _route(logits[token].double(), bias, case.instance.attrs)
            assert ids[token].tolist() == best, case.instance.where
            close(weights[token], expected, contract.tolerance[dtype], case.instance.where)


def _plain(weight):
    return weight.dequantize() if isinstance(weight, QuantTensor) else weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype, providers, close):
    contract = CONTRACTS["experts"]
    for case in contract.samples(dtype):
        attrs = case.instance.attrs
        x, shares, ids = case.make()
        named = {name: _plain(weight).double() for name, weight in case.weights.items()}
        expected = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(x.shape[0]):
            for share, expert in zip(shares[token].double(), ids[token].tolist(), strict=True):
                row = x[token].double() * (share if attrs["weight_on_input"] else 1)
                h = named["gate_up"][expert] @ row
                h = h + named["gate_up_bias"][expert] if "gate_up_bias" in named else h
                act = FUNCTIONS[attrs["activation"]]
                if attrs["gated"]:
                    gate, up = (h[0::2], h[1::2]) if attrs["interleaved"] else h.chunk(2)
                    if attrs["limit"] is not None:
                        gate, up = gate.clamp(max=attrs["limit"]), up.clamp(-attrs["limit"], attrs["limit"])
                    h = act(gate) * (up + attrs["up_offset"])
                else:
                    h = act(h)
                out = named["down"][expert] @ h
                out = out + named["down_bias"][expert] if "down_bias" in named else out
                expected[token] += out if attrs["weight_on_input"] else out * share
        actual = run(providers["experts"], case)
        assert actual.dtype == dtype
        close(actual, expected, contract.tolerance[dtype], case.instance.where)


def test_no_tokens(providers):
    case = next(iter(CONTRACTS["experts"].samples(torch.float32)))
    provider = providers["experts"]
    packed = provider.pack(case.instance, case.weights)
    empty = provider.build(case.instance)(
        torch.zeros(0, 32), torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.int64), packed
    )
    assert empty.shape == (0, 32)


def test_tokens_do_not_depend_on_each_other(providers):
    case = next(iter(CONTRACTS["experts"].samples(torch.float32)))
    provider = providers["experts"]
    packed, kernel = provider.pack(case.instance, case.weights), provider.build(case.instance)
    x, shares, ids = case.make()
    together = kernel(x, shares, ids, packed)
    for t in range(x.shape[0]):
        alone = kernel(x[t : t + 1], shares[t : t + 1], ids[t : t + 1], packed)
        torch.testing.assert_close(together[t : t + 1], alone, atol=1e-6, rtol=1e-5)


ROUNDED = {
    "int8 rows": QuantScheme("int8", Packing.INT8, 8, 64, rounding=Rounding(Codes.INT8)),
    "float8 rows": QuantScheme("fp8", Packing.FLOAT8, 8, 64, rounding=Rounding(Codes.FLOAT8)),
    "float8 blocks": QuantScheme("b", Packing.FLOAT8, 8, 32, group_rows=48, rounding=Rounding(Codes.FLOAT8, 32)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["reference", "static"])
@pytest.mark.parametrize("name", ROUNDED)
def test_both_products_of_experts_round_their_inputs(name, form, dtype):
    """Token by token, expert by expert, the second product's input after the activation."""
    scheme, source = ROUNDED[name], Source(8)
    up, down = quantized(source, (3, 128, 64), scheme), quantized(source, (3, 64, 64), scheme)
    sizes = {"experts": 3, "top_k": 2, "hidden": 64, "intermediate": 64}
    given = specs({"gate_up": up, "down": down}, dtype)
    instance = CONTRACTS["experts"].instance("here", dtype, given, activation="silu", **sizes)
    x, shares = source.normal(5, 64, dtype=dtype), source.uniform(5, 2)
    ids = torch.tensor([[0, 1], [1, 2], [2, 2], [0, 2], [1, 0]])
    plain = (up.dequantize(dtype), down.dequantize(dtype))
    kernel = {"reference": build_experts, "static": static_experts}[form](instance)
    found = kernel(x, shares, ids, plain)
    wanted, unrounded = torch.zeros(5, 64), torch.zeros(5, 64)
    for rounds, total in ((True, wanted), (False, unrounded)):
        for token in range(5):
            for share, expert in zip(shares[token], ids[token].tolist(), strict=True):
                row = round_input(x[token], scheme.rounding) if rounds else x[token].float()
                gate, inner = (plain[0][expert].float() @ row).to(dtype).float().chunk(2)
                h = (F.silu(gate) * inner).to(dtype)
                h = round_input(h, scheme.rounding) if rounds else h.float()
                total[token] += share * (plain[1][expert].float() @ h).to(dtype).float()
    error = (found.float() - wanted).norm() / wanted.norm()
    assert found.dtype == dtype
    assert error < (1e-3 if dtype is torch.float32 else 1e-2)
    if dtype is torch.float32:
        assert error < (unrounded - wanted).norm() / wanted.norm() / 4
