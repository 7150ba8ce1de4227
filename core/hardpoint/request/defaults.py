"""Sampling defaults that a model brings along in its generation config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keys of generation_config.json that are defaults of requests, and the fields that they set.
_FIELDS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Fields of SamplingParams that the model's author recommends. Values that make no sense are left out."""
    found: dict[str, float] = {}
    for name, kind in _FIELDS.items():
        value = generation_config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and _in_range(name, value):
            found[name] = kind(value)
    return found


def _in_range(name: str, value: float) -> bool:
    if name == "temperature":
        return 0 <= value <= 2
    if name == "repetition_penalty":
        return 0 < value <= 10
    return value >= 0 if name == "top_k" else 0 < value <= 1 or (name == "min_p" and value == 0)
