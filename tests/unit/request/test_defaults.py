"""Sampling defaults out of a model's generation config."""

from __future__ import annotations

import pytest

from hardpoint.request.defaults import sampling_defaults


def test_known_keys_are_taken_with_their_types():
    config = {"temperature": 1, "top_k": 20.0, "top_p": 0.8, "repetition_penalty": 1.05, "eos_token_id": 2}
    found = sampling_defaults(config)
    assert found == {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    assert isinstance(found["top_k"], int)


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_k": -5},
        {"repetition_penalty": 0},
        {"min_p": float("nan")},
        {},
    ],
)
def test_nonsense_is_left_out(config):
    assert sampling_defaults(config) == {}
