"""Mixture of experts in Triton: routing to tiles, any shape of work, quantized experts, nothing read on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hardpoint_torch_gpu import experts as provider
from hardpoint_torch_gpu.experts import TritonExperts, cutting, tokens_per_tile
from hardpoint_torch_gpu.kernels.experts import Cut, Epilogue, combine, grouped, route
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample, Weight
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run, sample
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor
from hardpoint_platforms.reference.activation import FUNCTIONS, gate_with

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the conformance kit runs these"),
]

F32 = torch.float32


def case(ids: torch.Tensor, weights: dict[str, Weight], dtype: torch.dtype = F32, **attrs: Any) -> Sample:
    experts, hidden, inner = weights["down"].shape
    tokens, top_k = ids.shape
    full = {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": inner, **attrs}

    def make(s: Source) -> tuple[Any, ...]:
        return s.normal(tokens, hidden, dtype=dtype), s.uniform(tokens, top_k, low=0.1), ids

    return sample(CONTRACTS["experts"], "test", dtype, make, weights, **full)


def plain(experts: int, hidden: int, inner: int, gated: bool = True, bias: bool = False) -> dict[str, Weight]:
    source, rows = Source(2), 2 * inner if gated else inner
    weights: dict[str, Weight] = {
        "gate_up": source.normal(experts, rows, hidden, scale=hidden**-0.5),
        "down": source.normal(experts, hidden, inner, scale=inner**-0.5),
    }
    if bias:
        weights["gate_up_bias"], weights["down_bias"] = source.normal(experts, rows), source.normal(experts, hidden)
    return weights


def slot_by_slot(one: Sample) -> torch.Tensor:
    """The contract's formula for each token and slot alone, in float64."""
    attrs = one.instance.attrs
    x, shares, ids = one.make()
    w = {
        name: (part.dequantize() if isinstance(part, QuantTensor) else part).double()
        for name, part in one.weights.items()
    }
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        share, expert = shares[token, slot].double(), ids[token, slot]
        row = x[token].double() * share if attrs["weight_on_input"] else x[token].double()
        h = w["gate_up"][expert] @ row
        if "gate_up_bias" in w:
            h = h + w["gate_up_bias"][expert]
        if attrs["gated"]:
            gate, up = (h[0::2], h[1::2]) if attrs["interleaved"] else h.chunk(2)
            h = gate_with(gate, up, attrs["activation"], attrs["limit"], attrs["up_offset"])
        else:
            h = FUNCTIONS[attrs["activation"]](h)
        out = w["down"][expert] @ h
        if "down_bias" in w:
            out = out + w["down_bias"][expert]
        y[token] += out if attrs["weight_on_input"] else out * share
    return y


def check(one: Sample) -> None:
    found = run(TritonExperts(), one)
    assert found.dtype is one.instance.dtype
    tolerance = CONTRACTS["experts"].tolerance[one.instance.dtype]
    torch.testing.assert_close(found.double(), slot_by_slot(one), atol=tolerance.atol, rtol=tolerance.rtol)


IDS = {
    "one token": torch.tensor([[5, 2, 0]]),
    "one slot": torch.tensor([[6]]),
    "all to one expert": torch.full((37, 1), 3),
    "all to the last": torch.full((33, 1), 6),
    "one expert twice": torch.tensor([[4, 4], [4, 1]]),
    "some experts empty": Source(7).integers(2, 5, 21, 2),
    "every expert": Source(8).integers(0, 7, 50, 3),
    "one slot more than tiles hold": torch.tensor([[0]] * 16 + [[1]] * 17 + [[3]] * 32),
}


@pytest.mark.parametrize("tokens", [1, 16, 32, 128])
@pytest.mark.parametrize("name", IDS)
def test_tiles_hold_every_slot_once_by_expert(name: str, tokens: int) -> None:
    ids = IDS[name]
    routing = route(ids, torch.ones(ids.shape), 7, tokens)
    assert torch.equal(routing.order.long(), ids.flatten().argsort(stable=True))
    assert routing.tiles.shape[0] <= min(ids.numel() // tokens + 7, ids.numel())
    held: list[int] = []
    for expert, first, end, _ in routing.tiles.tolist():
        mine = routing.order[first : min(first + tokens, end)].tolist()
        assert all(ids.flatten()[slot] == expert for slot in mine)
        held += mine
    assert held == routing.order.tolist()


def test_many_slots_are_sorted_in_several_turns() -> None:
    ids = Source(9).integers(0, 5, 2500, 2)
    routing = route(ids, torch.ones(ids.shape), 5, 16)
    assert torch.equal(routing.order.long(), ids.flatten().argsort(stable=True))
    first, end = routing.tiles[:, 1], routing.tiles[:, 2]
    assert int((end - first).clamp(max=16).sum()) == ids.numel()


@pytest.mark.parametrize("name", IDS)
def test_odd_sizes_and_any_spread_of_tokens(name: str) -> None:
    check(case(IDS[name], plain(7, 45, 21)))


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(
    ("gated", "attrs"),
    [
        (True, {"interleaved": True, "limit": 0.5, "up_offset": 1.0, "activation": "gelu_quick"}),
        (True, {"activation": "gelu_tanh", "limit": 0.3}),
        (False, {"activation": "relu2"}),
        (False, {"activation": "gelu", "interleaved": True, "limit": 0.1, "up_offset": 3.0}),
    ],
    ids=["interleaved", "halves", "not gated", "not gated, what gates is ignored"],
)
def test_what_becomes_of_the_sums(gated: bool, attrs: dict[str, Any], on_input: bool) -> None:
    weights = plain(7, 40, 35, gated, bias=True)
    check(case(IDS["some experts empty"], weights, gated=gated, weight_on_input=on_input, **attrs))


CUTS = (Cut(32, 16, 32, 4, 1), Cut(64, 32, 16, 4, 2), Cut(128, 128, 64, 8, 3))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_way_to_cut_the_products(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "tokens_per_tile", lambda slots, experts: cut.tokens)
    monkeypatch.setattr(provider, "cutting", lambda *_: cut)
    check(case(IDS["every expert"], plain(7, 96, 70, bias=True)))


def test_tiles_grow_with_the_slots_of_an_expert() -> None:
    assert [tokens_per_tile(slots, 8) for slots in (1, 96, 97, 192, 384, 385, 65536)] == [16, 16, 32, 32, 64, 128, 128]
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (16, 32, 64, 128):
            for packed in (False, True):
                assert cutting(tokens, dtype, packed).tokens == tokens


SCHEME_PAIRS = (("q4_k", "q8_0"), ("q4_0", "nf4"), ("q6_k", "q4_1"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("up", "down"), SCHEME_PAIRS)
def test_quantized_experts_stay_packed(up: str, down: str, dtype: torch.dtype) -> None:
    """Rows of an expert are no multiple of what a packed weight is padded to."""
    weights: dict[str, Weight] = {
        "gate_up": quantized(Source(3), (3, 2 * 64, 256), SCHEMES[up]),
        "down": quantized(Source(4), (3, 256, 64), SCHEMES[down]),
        "gate_up_bias": Source(5).normal(3, 128, dtype=dtype),
        "down_bias": Source(6).normal(3, 256, dtype=dtype),
    }
    one = case(Source(7).integers(0, 3, 6, 2), weights, dtype, interleaved=True)
    reason = TritonExperts().supports(one.instance).reason
    assert f"gate_up {up} stays packed" in reason
    assert f"down {down} stays packed" in reason
    assert len(TritonExperts().pack(one.instance, one.weights)) == 12
    check(one)


def test_odd_rows_of_quantized_experts_and_a_plain_weight_beside_them() -> None:
    weights: dict[str, Weight] = {
        "gate_up": quantized(Source(3), (3, 2 * 21, 96), SCHEMES["q4_1"]),
        "down": Source(4).normal(3, 96, 21, scale=0.2),
    }
    check(case(Source(7).integers(0, 3, 9, 2), weights))


def test_what_no_kernel_takes_is_made_plain_at_load() -> None:
    scheme = QuantScheme("by 8", Packing.UINT4, 4, 8, offset=True)
    weights: dict[str, Weight] = {
        "gate_up": quantized(Source(3), (3, 32, 40), scheme),
        "down": quantized(Source(3), (3, 40, 16), QuantScheme("by 16", Packing.INT8, 8, 16)),
    }
    one = case(Source(7).integers(0, 3, 9, 2), weights)
    reason = TritonExperts().supports(one.instance).reason
    assert "gate_up by 8 dequantized at load: groups of 8 columns" in reason
    assert "down by 16 stays packed" in reason
    assert len(TritonExperts().pack(one.instance, one.weights)) == 6
    check(one)


def test_other_dtypes_are_refused() -> None:
    weights = {name: part.double() for name, part in plain(3, 8, 8).items() if isinstance(part, torch.Tensor)}
    one = case(Source(7).integers(0, 3, 2, 2), {**weights}, torch.float64)
    answer = TritonExperts().supports(one.instance)
    assert not answer
    assert "float64" in answer.reason


def test_a_token_does_not_depend_on_its_company() -> None:
    one = case(IDS["some experts empty"], plain(7, 45, 21, bias=True))
    x, shares, ids = one.make()
    spoiled = x.clone()
    spoiled[::2] = float("nan")
    packed = TritonExperts().pack(one.instance, one.weights)
    kernel = TritonExperts().build(one.instance)
    both = [kernel(rows, shares, ids, packed) for rows in (x, spoiled)]
    assert torch.equal(both[0][1::2], both[1][1::2])
    assert both[1][::2].isnan().all()


def test_views_are_taken_as_they_are() -> None:
    one = case(IDS["every expert"], plain(7, 45, 21))
    x, shares, ids = one.make()
    turned = {name: part.transpose(1, 2).contiguous().transpose(1, 2) for name, part in one.weights.items()}  # type: ignore[union-attr]
    packed = TritonExperts().pack(one.instance, turned)
    arguments = (part.t().contiguous().t() for part in (x, shares, ids))
    found = TritonExperts().build(one.instance)(*arguments, packed)
    assert torch.equal(found, run(TritonExperts(), one))


def test_no_tokens_at_all() -> None:
    one = case(torch.zeros((0, 2), dtype=torch.int64), plain(3, 8, 8))
    assert run(TritonExperts(), one).shape == (0, 8)


def test_slots_are_summed_in_float32() -> None:
    parts = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
    assert combine(parts, 3).item() == 2050.0


def test_a_product_alone_keeps_the_order_of_the_slots() -> None:
    ids = torch.tensor([[2, 0], [1, 2]])
    routing = route(ids, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 3, 16)
    w = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    x = torch.tensor([[1.0], [2.0]])
    sorted_rows = grouped(x, w, None, routing, 1, True, Epilogue(), Cut(16, 16, 16, 1, 1))
    assert sorted_rows.flatten().tolist() == [1.0, 20.0, 100.0, 200.0]
    by_slot = grouped(sorted_rows, w, None, routing, 1, False, Epilogue(late=True), Cut(16, 16, 16, 1, 1))
    assert by_slot.flatten().tolist() == [10000.0, 2.0, 600.0, 80000.0]


class Calls(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_graph_can_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the launches only memory is made: no value is read, no operator has a shape that depends on one."""
    one = case(IDS["every expert"], plain(7, 45, 21, bias=True))
    packed = TritonExperts().pack(one.instance, one.weights)
    kernel, arguments = TritonExperts().build(one.instance), one.make()
    kernels = type(route.__globals__["_route"])
    launches: list[str] = []

    def noted(self: Any, grid: Any) -> Any:
        return lambda *args, **named: launches.append(self.fn.__name__)

    monkeypatch.setattr(kernels, "__getitem__", noted)
    with Calls() as calls:
        kernel(*arguments, packed)
    assert launches == ["_route", "_grouped", "_grouped", "_combine"]
    assert calls.names <= {"aten.empty.memory_format", "aten.view.default", "aten.detach.default"}
