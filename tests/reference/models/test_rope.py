"""Rope parameters in both spellings, every scaling against transformers, and the context they give (case S-40)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint.models.registry import find_family, model_context
from hardpoint.models.rope import rope_table
from hardpoint.models.spec import RopeSpec

pytestmark = pytest.mark.reference

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _rope(config: dict[str, Any], length: int = 64) -> RopeSpec:
    family = find_family(config)
    rope = family.spec(family.fields(config), length).layers[0].attention.rope
    assert rope is not None
    return rope


def _scaled(scaling: Any, **more: Any) -> dict[str, Any]:
    return {**BASE, "rope_scaling": scaling, **more}


SPELLINGS = [
    [{"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}],
    [{"rope_type": "linear", "factor": 2}, {"type": "linear", "rope_type": "linear", "factor": "2.0"}],
    [{"type": "yarn", "factor": 4}, {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}],
    [
        {"type": "yarn", "factor": 2, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "original_max_position_embeddings": 32},
    ],
    [None, {}],
    [None, {"type": "default"}],
    [None, {"rope_type": "default", "rope_theta": 5000.0}],
]


@pytest.mark.parametrize("pair", SPELLINGS)
def test_spellings_of_one_meaning(pair: list[Any]) -> None:
    one, other = (_scaled(scaling) for scaling in pair)
    assert _rope(one) == _rope(other)
    assert model_context(one) == model_context(other)
    if pair[1]:
        newer = {key: value for key, value in BASE.items() if key != "rope_theta"}
        newer["rope_parameters"] = {"rope_theta": 5000.0, **pair[1]}
        assert _rope(newer) == _rope(other)


@pytest.mark.parametrize(
    ("scaling", "more", "context"),
    [
        (None, {}, 64),
        ({"type": "linear", "factor": 2}, {}, 128),
        ({"type": "dynamic", "factor": 4.0}, {}, 256),
        ({"type": "yarn", "factor": 4}, {}, 256),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 16}, {}, 64),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}, {}, 256),
        ({"rope_type": "llama3", **LLAMA3}, {}, 64),
        ({"type": "yarn", "factor": 2}, {"max_position_embeddings": 100}, 200),
    ],
)
def test_derived_context(scaling: Any, more: dict[str, Any], context: int) -> None:
    assert model_context(_scaled(scaling, **more)) == context


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"type": "zigzag"}, "rope_scaling.type"),
        ({"rope_type": "zigzag", "factor": 2}, "rope_scaling.rope_type"),
        ({"type": "linear", "factor": 0}, "rope_scaling.factor"),
        ({"type": "linear", "factor": -2}, "rope_scaling.factor"),
        ({"type": "linear", "factor": "two"}, "rope_scaling.factor"),
        ({"type": "linear", "factor": True}, "rope_scaling.factor"),
        ({"type": "linear", "factor": float("nan")}, "rope_scaling.factor"),
        ({"type": "linear"}, "rope_scaling.factor"),
        ({"type": "dynamic", "factor": None}, "rope_scaling.factor"),
        ({"type": "llama3", "factor": 8}, "rope_scaling.low_freq_factor"),
        ({"type": "llama3", **LLAMA3, "high_freq_factor": 0.5}, "rope_scaling.high_freq_factor"),
        ({"type": "yarn", "factor": 2, "original_max_position_embeddings": -1}, "original_max_position_embeddings"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}, "rope_scaling.short_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 8}, "rope_scaling.long_factor"),
        ("linear", "rope_scaling"),
        ([2], "rope_scaling"),
    ],
)
def test_bad_parameters_are_named(scaling: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        _rope(_scaled(scaling))


def test_an_override_in_the_older_spelling_works_on_a_newer_config() -> None:
    newer = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
    del newer["rope_theta"]
    overridden = newer | {"rope_scaling": {"type": "linear", "factor": 4}}
    plain, scaled = _rope(newer), _rope(overridden)
    assert torch.allclose(torch.tensor(plain.inv_freq) / 4, torch.tensor(scaled.inv_freq))


FREQUENCIES: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("default", {"partial_rotary_factor": 0.5}),
    ("linear", {"factor": 3.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16}),
    (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 16, "truncate": False, "beta_fast": 8, "beta_slow": 2},
    ),
    ("yarn", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}),
    ("yarn", {"factor": 1.0, "attention_factor": 0.8}),
    ("llama3", LLAMA3),
    ("dynamic", {"factor": 4.0}),
    ("longrope", {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 32}),
    ("longrope", {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8, "factor": 2.0}),
    ("proportional", {"partial_rotary_factor": 0.25}),
]


@pytest.mark.parametrize(("kind", "values"), FREQUENCIES)
def test_frequencies_equal_transformers(kind: str, values: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"rope_type": kind, "rope_theta": 5000.0, **values}
    rope = _rope({**BASE, "rope_parameters": given})
    if kind == "default":
        dim = int(16 * values.get("partial_rotary_factor", 1.0))
        wanted, scale = 1.0 / 5000.0 ** (torch.arange(0, dim, 2).float() / dim), 1.0
    else:
        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_parameters=dict(given)
        )
        seq_len = 64 if kind == "longrope" else None
        wanted, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_len)
    assert torch.allclose(torch.tensor(rope.inv_freq), wanted, rtol=1e-6, atol=0)
    assert rope.mscale == pytest.approx(scale)


def test_longest_sequence_chooses_the_longrope_list() -> None:
    values = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    config = _scaled({"type": "su", **values})
    short, long = _rope(config, 32), _rope(config, 33)
    assert short.inv_freq[0] == 1.0
    assert long.inv_freq[0] == 0.25


def test_the_table_is_cos_then_sin_times_mscale() -> None:
    table = rope_table(RopeSpec((1.0, 0.5), mscale=2.0), 3)
    assert table.shape == (3, 4)
    assert table.dtype == torch.float32
    wanted = torch.tensor([2.0]) * torch.tensor([2.0, 1.0]).cos()
    assert torch.allclose(table[2, :2], wanted)
    assert torch.allclose(table[2, 2:], 2 * torch.tensor([2.0, 1.0]).sin())
