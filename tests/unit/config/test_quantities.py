"""Sizes, counts and pairs of the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.config.quantities import at_least, between, byte_size, format_bytes, key_value, token_count


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1gib", 1 << 30),
        ("4096", 4096),
        ("8 KiB", 8192),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2XB", "1.5", "0", "0GiB", "1e9", "nan", "2 Gi B"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        byte_size(text)


@given(st.integers(1, 2**50))
def test_plain_bytes_stay(size: int) -> None:
    assert byte_size(str(size)) == size
    assert byte_size(f"{size}KiB") == size * 1024


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("8k", 8000), ("8K", 8192), ("1M", 1 << 20)])
def test_token_counts(text: str, count: int) -> None:
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["0", "-5", "1.5k", "k", "8kk", ""])
def test_wrong_token_counts(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        token_count(text)


def test_ranges() -> None:
    assert at_least(1)("7") == 7
    assert between(0.0, 1.0)("0.25") == 0.25
    for parse, text in (
        (at_least(1), "0"),
        (at_least(0, 9), "10"),
        (between(0.0, 1.0), "nan"),
        (between(0.0, 1.0), "2"),
    ):
        with pytest.raises(ArgumentTypeError):
            parse(text)


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("a=1", {"a": 1}),
        ("a=true", {"a": True}),
        ("a=fast", {"a": "fast"}),
        ("a=", {"a": ""}),
        ('a={"b": [1]}', {"a": {"b": [1]}}),
        ("a=b=c", {"a": "b=c"}),
        ('{"a": 1, "b": null}', {"a": 1, "b": None}),
    ],
)
def test_pairs(text: str, pairs: dict[str, object]) -> None:
    assert key_value(text) == pairs


@pytest.mark.parametrize("text", ["a", "=1", "{broken", ""])
def test_wrong_pairs(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        key_value(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (98_362_432, "93.8 MiB"), (3 << 30, "3.00 GiB"), (2 << 40, "2048.00 GiB")],
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
