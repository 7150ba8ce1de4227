"""Rope scaling in the older and the newer spelling, from the config and from overrides (case S-40).

Frequencies by themselves, and what is refused, are in tests/reference/models/test_rope.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import llama_config, random_weights, save_llama

from hardpoint import SamplingParams
from hardpoint.errors import ConfigError

pytestmark = pytest.mark.reference

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: name, rope_scaling of a model of 64 positions, the context that comes of it, the same for transformers
CASES: list[tuple[str, Any, int, dict[str, Any]]] = [
    ("none", None, 64, {"rope_type": "default"}),
    ("empty", {}, 64, {"rope_type": "default"}),
    ("linear", {"type": "linear", "factor": 4}, 256, {"rope_type": "linear", "factor": 4.0}),
    (
        "both keys",
        {"type": "linear", "rope_type": "linear", "factor": "4.0"},
        256,
        {"rope_type": "linear", "factor": 4.0},
    ),
    (
        "yarn",
        {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
        256,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    (
        "yarn short",
        {"type": "yarn", "factor": 4},
        256,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
]


def _folder(path: Path, **changes: Any) -> Path:
    config = llama_config(max_position_embeddings=64) | changes
    return save_llama(path, config, random_weights(config))


def _oracle_folder(path: Path, context: int, parameters: dict[str, Any]) -> Path:
    config = llama_config(max_position_embeddings=context, rope_parameters={"rope_theta": 10000.0, **parameters})
    del config["rope_theta"]
    return save_llama(path, config, random_weights(config))


def _check(folder: Path, truth: Any, context: int, prompt_of: Any, start: Any, **settings: Any) -> None:
    driver = start(folder, **settings)
    assert driver.info.max_model_len == context
    ids = prompt_of(context - 4)
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    answer = driver.ask_one(ids, params)
    expected = truth.logprobs(ids + answer.token_ids)
    everything = [*(answer.prompt_logprobs or [])[1:], *answer.logprobs]
    for position, (entry, token) in enumerate(zip(everything, [*ids[1:], *answer.token_ids], strict=True)):
        assert entry is not None
        assert abs(entry[token].logprob - expected[position, token].item()) < 1e-4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_both_spellings_give_transformers_logits(
    case: Any, device: str, tmp_path: Path, start: Any, oracle: Any, prompt_of: Any
) -> None:
    _, scaling, context, parameters = case
    truth = oracle(_oracle_folder(tmp_path / "truth", context, parameters))
    older = _folder(tmp_path / "older", rope_scaling=scaling)
    _check(older, truth, context, prompt_of, start, device=device, budget=60)
    newer = _folder(tmp_path / "newer", rope_parameters={"rope_theta": 10000.0, **parameters}, rope_theta=None)
    _check(newer, truth, context, prompt_of, start, device=device)
    plain = _folder(tmp_path / "plain")
    _check(plain, truth, context, prompt_of, start, device=device, overrides={"rope_scaling": scaling})


def test_llama3(device: str, tmp_path: Path, start: Any, oracle: Any, prompt_of: Any) -> None:
    """Its context is that of the config: the factor is in it already."""
    truth = oracle(_oracle_folder(tmp_path / "truth", 256, LLAMA3))
    folder = _folder(tmp_path / "older", rope_scaling=LLAMA3, max_position_embeddings=256)
    _check(folder, truth, 256, prompt_of, start, device=device, budget=100)


@pytest.mark.parametrize(
    ("scaling", "key"),
    [({"type": "zigzag"}, "zigzag"), ({"type": "linear", "factor": 0}, "factor"), ({"type": "yarn"}, "factor")],
)
def test_what_cannot_be_stops_the_start(scaling: Any, key: str, tmp_path: Path, start: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        start(_folder(tmp_path, rope_scaling=scaling))
    with pytest.raises(ConfigError, match=key):
        start(_folder(tmp_path), overrides={"rope_scaling": scaling})
