"""Sharded checkpoints through a whole engine: equal to the unsharded one, or an error at start-up (case S-26).

Every kind of damage is in tests/reference/models/test_safetensors.py; here, that the engine passes it on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_driver import assert_same
from safetensors.torch import load_file, save_file

from hardpoint import SamplingParams
from hardpoint.errors import WeightsError

pytestmark = pytest.mark.reference

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1, ignore_eos=True)


@pytest.fixture
def sharded(tiny: Path, tmp_path: Path) -> Path:
    """The random tiny model in three files with an index."""
    weights = load_file(tiny / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    names, places = sorted(weights), {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = names[number::3]
        save_file({name: weights[name] for name in part}, tmp_path / file)
        places |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path


def test_shards_and_clutter_change_nothing(sharded: Path, tiny: Path, device: str, start: Any, prompt_of: Any) -> None:
    wanted = start(tiny, device=device).ask_one(prompt_of(30), PARAMS)
    (sharded / "model.safetensors").write_bytes(b"another, half downloaded")
    (sharded / "pytorch_model.bin").write_bytes(b"pickle")
    for _ in range(2):
        assert_same(start(sharded, device=device, max_num_seqs=8).ask_one(prompt_of(30), PARAMS), wanted, 1e-5)


def test_a_missing_tensor_stops_the_start(sharded: Path, device: str, start: Any) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    file = sharded / index["weight_map"][name]
    weights = load_file(file)
    del weights[name]
    save_file(weights, file)
    with pytest.raises(WeightsError, match=name) as caught:
        start(sharded, device=device)
    assert file.name in str(caught.value)
    file.unlink()
    with pytest.raises(WeightsError, match=file.name):
        start(sharded, device=device)
