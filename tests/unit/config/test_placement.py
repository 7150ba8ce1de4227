"""--placement: how it is read, and which layers end up where."""

from __future__ import annotations

import itertools
from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.config.placement import Part, Placement, layers_by_device, parse_placement
from hardpoint.errors import ConfigError


def test_parts_are_read_in_any_order_and_with_open_ends() -> None:
    placed = parse_placement("layers[15:]=acme:1, layers[:15]=cpu")
    assert placed == Placement((Part(15, None, "acme:1"), Part(None, 15, "cpu")))
    assert layers_by_device(placed, 30) == (("cpu", range(15)), ("acme:1", range(15, 30)))
    assert str(placed.parts[0]) == "layers[15:]=acme:1"


def test_neighbours_on_one_device_are_one_part() -> None:
    placed = parse_placement("layers[0:2]=a,layers[2:5]=a,layers[5:6]=b,layers[6:]=a")
    assert layers_by_device(placed, 8) == (("a", range(5)), ("b", range(5, 6)), ("a", range(6, 8)))


@pytest.mark.parametrize(
    "text", ["", "cpu", "layers=cpu", "layers[0-3]=cpu", "layers[0:3]=", "layers[0:3]=a,", "layers[-1:3]=a", "[0:3]=a"]
)
def test_other_forms_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"write layers\[0:15\]=cpu"):
        parse_placement(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers[0:4]=a,layers[5:]=b", r"layers\[4:5\] on no device"),
        ("layers[0:4]=a,layers[3:]=b", "layer 3 on two devices"),
        ("layers[1:]=a", r"layers\[0:1\] on no device"),
        ("layers[0:7]=a", r"layers\[7:8\] on no device"),
        ("layers[0:9]=a", "the model has layers 0 to 7"),
        ("layers[4:4]=a", "the end is not included"),
    ],
)
def test_every_layer_is_placed_once(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_by_device(parse_placement(text), 8)


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from("abc")), min_size=1, max_size=8))
def test_any_cut_covers_the_model_in_order(parts: list[tuple[int, str]]) -> None:
    at, placed = 0, []
    for size, device in parts:
        placed.append(Part(at, at + size, device))
        at += size
    found = layers_by_device(Placement(tuple(placed[::-1])), at)
    assert [layer for _, layers in found for layer in layers] == list(range(at))
    assert all(one[0] != two[0] for one, two in itertools.pairwise(found))
