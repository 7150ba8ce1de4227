"""Texts of the command line into numbers and pairs; a wrong one is an ArgumentTypeError that says what is right."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def byte_size(text: str) -> int:
    """ "2GiB", "512MiB", "1.5GB" or plain bytes. GiB is 1024^3 bytes, GB is 1000^3."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip(), re.IGNORECASE)
    unit = (_BYTES | _BINARY).get(match[2].lower()) if match else None
    if match is None or unit is None or (unit == 1 and "." in match[1]):
        raise ArgumentTypeError(f"{text!r} is not a size; write 2GiB, 512MiB or a number of bytes")
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size == 0:
        raise ArgumentTypeError(f"{text!r}: a size above zero is needed")
    return size


def token_count(text: str) -> int:
    """ "4096", "32k" (thousand) or "32K" (1024 times), as vLLM reads lengths."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if match is None or int(match[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is not a number of tokens; write 4096, 4K (4 x 1024) or 4k (4 x 1000)")
    return int(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[match[2]]


def at_least(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers from `lowest` to `highest`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < lowest or (highest is not None and number > highest):
            limit = f"from {lowest} to {highest}" if highest is not None else f"at least {lowest}"
            raise ArgumentTypeError(f"{number} is out of range: it must be {limit}")
        return number

    return parse


def between(lowest: float, highest: float) -> Callable[[str], float]:
    """A parser of numbers from `lowest` to `highest`; NaN is neither."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a number") from None
        if not lowest <= number <= highest:
            raise ArgumentTypeError(f"{text} is out of range: it must be from {lowest:g} to {highest:g}")
        return number

    return parse


def key_value(text: str) -> dict[str, Any]:
    """ "key=JSON", or a whole JSON object. What is no JSON after the "=" is taken as text."""
    if text.lstrip().startswith("{"):
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise ArgumentTypeError(f"not a JSON object: {error}") from None
        return dict(parsed)
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ArgumentTypeError(f"{text!r} is not of the form key=value")
    try:
        return {key.strip(): json.loads(value)}
    except ValueError:
        return {key.strip(): value}


def format_bytes(size: float) -> str:
    """98362432 -> "93.8 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
