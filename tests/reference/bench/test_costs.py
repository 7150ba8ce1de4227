"""Bytes and multiply-adds of ops, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hardpoint.bench.costs import Attended, Call, Cost, attended, cost_of
from hardpoint.bench.kernels import number_kind
from hardpoint.bench.meter import short_name
from hardpoint_platforms.ceilings import Ceilings
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance, WeightSpec
from hardpoint_platforms.quant import Packing, QuantScheme

pytestmark = pytest.mark.reference

FOUR = QuantScheme("four", Packing.UINT4, 4, 32)


def instance(op: str, *shapes: tuple[int, ...], scheme: QuantScheme | None = None, **attrs: object) -> OpInstance:
    names = [name.rstrip("?") for name in CONTRACTS[op].weights]
    weights = {name: WeightSpec(shape, torch.float32, scheme) for name, shape in zip(names, shapes, strict=False)}
    return CONTRACTS[op].instance("here", torch.float32, weights, **attrs)


@pytest.mark.parametrize(
    ("call", "cost"),
    [
        # 3 rows: 10 in, 6 out, 4 bytes each; 100 bytes of weights
        (Call(instance("linear", (6, 10), in_features=10, out_features=6), 3, (30,), 100), Cost(100 + 192, 180)),
        (Call(instance("logits", (50, 8)), 2, (16,), 400), Cost(400 + 2 * 8 * 4 + 2 * 50 * 4, 800)),
        (
            Call(instance("gated_mlp", (8, 3), (3, 4), hidden=3, intermediate=4, kind="silu"), 5, (15,), 144),
            Cost(144 + 5 * 2 * 3 * 4, 5 * 36),
        ),
        # as those, and 3 rows of a residual read, of a sum written
        (
            Call(
                instance("norm_linear", (10,), (10,), (6, 10), in_features=10, out_features=6, norm_kind="rms"),
                3,
                (30, 30),
                140,
            ),
            Cost(140 + 192 + 2 * 3 * 10 * 4, 180),
        ),
        (
            Call(
                instance(
                    "norm_gated_mlp", (3,), (3,), (8, 3), (3, 4), hidden=3, intermediate=4, kind="silu", norm_kind="ln"
                ),
                5,
                (15, 15),
                156,
            ),
            Cost(156 + 5 * 4 * 3 * 4, 5 * 36),
        ),
        # two rows of a table of 10 rows of 7 bytes each, two ids, two rows of 8 numbers
        (Call(instance("embedding", (10, 8)), 2, (2,), 70), Cost(2 * 7 + 2 * 8 + 2 * 32)),
        (Call(instance("norm", (8,), kind="rms", eps=1e-5), 3, (24,), 32), Cost(2 * 24 * 4 + 32)),
        (Call(instance("add_norm", (8,), kind="rms", eps=1e-5), 3, (24, 24), 32), Cost(4 * 24 * 4 + 32)),
        (Call(instance("gated_activation", kind="silu"), 3, (48,)), Cost((48 + 24) * 4)),
        (Call(instance("rope", (99, 4), rotary_dim=4), 2, (16, 8, 2), 1584), Cost(2 * 24 * 4 + 2 * 16 + 16)),
        (Call(instance("moe_route", experts=8, top_k=2), 3, (24,)), Cost(3 * (32 + 24))),
        # 3 of 4 experts were chosen: three quarters of the weights
        (
            Call(instance("experts", experts=4, top_k=2, hidden=5, intermediate=7), 2, (10, 4, 4), 400, experts=3),
            Cost(300 + 2 * (40 + 24), 2 * 2 * 3 * 35),
        ),
        # 2 query heads and 1 of keys of 4; 9 pairs; 6 cached tokens read and 3 written, of 8 numbers of 2 bytes
        (
            Call(
                instance("attention", heads=2, kv_heads=1, head_dim=4, v_head_dim=4, scale=1.0),
                3,
                (24, 12, 12),
                attended=Attended(9, 6, 3, 2),
            ),
            Cost((24 + 12 + 12 + 24) * 4 + 9 * 16, 9 * 2 * 8),
        ),
        # likewise, and 2 numbers of the table and a position for each of 3 tokens, and two norms of 4 numbers
        (
            Call(
                instance(
                    "rotary_attention",
                    (99, 2),
                    (4,),
                    (4,),
                    heads=2,
                    kv_heads=1,
                    head_dim=4,
                    v_head_dim=4,
                    scale=1.0,
                    rotary_dim=2,
                    norm="rms",
                ),
                3,
                (24, 12, 12, 3),
                824,
                attended=Attended(9, 6, 3, 2),
            ),
            Cost((24 + 12 + 12 + 24) * 4 + 9 * 16 + 3 * 16 + 32, 9 * 2 * 8),
        ),
        (
            Call(
                instance(
                    "mla_attention", (10, 6), heads=2, nope_dim=3, rope_dim=1, v_head_dim=2, latent_dim=6, scale=1.0
                ),
                1,
                (6, 2, 6, 1),
                240,
                attended=Attended(5, 5, 1, 2),
            ),
            Cost((6 + 2 + 6 + 1 + 4) * 4 + 240 + 6 * 7 * 2, 5 * 2 * 13 + 2 * 6 * 5),
        ),
        (Call(instance("sample"), 2, (100, 0)), Cost(400)),
    ],
    ids=lambda value: value.instance.op if isinstance(value, Call) else "",
)
def test_costs_by_hand(call: Call, cost: Cost) -> None:
    assert cost_of(call) == cost


def test_unknown_ops_cost_nothing_that_is_known() -> None:
    assert cost_of(Call(instance("activation", kind="silu"), 1, (4,))) == Cost(32)
    assert cost_of(Call(dataclasses.replace(instance("sample"), op="verify"), 1, (4,))) is None
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 4, "v_head_dim": 4, "scale": 1.0}
    assert cost_of(Call(instance("attention", **shape), 1, (4, 4, 4))) is None


def test_what_a_batch_attends_to() -> None:
    # one prompt of 3: 1 + 2 + 3 pairs; a decode behind 4: 5 pairs
    assert attended([3, 1], [3, 5], None, 2) == Attended(11, 8, 4, 2)
    # in a window of 2: 1 + 2 + 2 pairs, and 2; the prompt reads its 3 tokens, the decode the last 2
    assert attended([3, 1], [3, 5], 2, 4) == Attended(7, 5, 4, 4)


def test_products_are_held_against_their_own_ceiling() -> None:
    both, one = Ceilings(1.0, {"float32": 1.0, "int8": 2.0}), Ceilings(1.0, {"bfloat16": 1.0})
    quantized = Call(instance("linear", (6, 32), scheme=FOUR, in_features=32, out_features=6), 1, (32,), 120)
    cost = Cost(1.0, 1.0)
    assert number_kind(quantized, cost, both) == "int8"
    assert number_kind(dataclasses.replace(quantized, weight_bytes=4 * 192), cost, both) == "float32"
    assert number_kind(quantized, cost, one) is None
    assert number_kind(quantized, cost, Ceilings(1.0, {"float32": 1.0})) is None
    assert number_kind(quantized, Cost(1.0), both) is None


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (instance("linear", (6, 32), scheme=FOUR, in_features=32, out_features=6), "linear 32 -> 6 four"),
        (instance("logits", (50, 8)), "logits 8 -> 50"),
        (instance("norm", (8,), kind="rms", eps=1e-5), "norm 8"),
        (
            instance("attention", heads=4, kv_heads=2, head_dim=8, v_head_dim=8, scale=1.0, window=9),
            "attention 4/2 x 8 window 9",
        ),
        (
            instance(
                "rotary_attention",
                (99, 8),
                heads=4,
                kv_heads=2,
                head_dim=8,
                v_head_dim=8,
                scale=1.0,
                window=9,
                rotary_dim=8,
                norm="rms",
            ),
            "rotary_attention 4/2 x 8 window 9 rope 8 rms",
        ),
    ],
)
def test_names_carry_sizes(op: OpInstance, name: str) -> None:
    assert short_name(op) == name
