"""`--kernel`: what it may say, and which ops it is about."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from hardpoint.config.kernels import parse_kernel_choice


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("attention=triton", ("attention", "*", "triton")),
        ("attention[*]=triton attention", ("attention", "*", "triton attention")),
        (" linear[layers.1?.mlp.*]=reference ", ("linear", "layers.1?.mlp.*", "reference")),
        ("*=reference", ("*", "*", "reference")),
    ],
)
def test_what_it_reads(text: str, meant: tuple[str, str, str]) -> None:
    choice = parse_kernel_choice(text)
    assert (choice.op, choice.where, choice.provider) == meant


@pytest.mark.parametrize("text", ["", "attention", "attention=", "=triton", "attention[]=x", "attention[*=x", "a b=c"])
def test_what_it_does_not(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="OP=PROVIDER"):
        parse_kernel_choice(text)


def test_what_it_covers() -> None:
    choice = parse_kernel_choice("linear[layers.1.*]=torch")
    assert choice.covers("linear", "layers.1.mlp.down_proj")
    assert not choice.covers("linear", "layers.11.mlp.down_proj")
    assert not choice.covers("logits", "layers.1.mlp.down_proj")
    assert choice.allows("torch linear")
    assert not choice.allows("native linear")
    assert str(choice) == "linear[layers.1.*]=torch"
