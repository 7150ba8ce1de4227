"""Opening models of every format by every name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hardpoint.config.engine import ModelConfig
from hardpoint.errors import ConfigError, ModelError, ModelNotFound, WeightsError
from hardpoint.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.reference
NAME = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of safetensors."""
    path = tmp_path / "folder"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8, "torch_dtype": "bfloat16"}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    save_file({NAME: torch.ones(4, 8)}, path / "model.safetensors")
    return path


def test_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(model=str(folder), overrides={"hidden_size": 16, "new": 1}))
    assert checkpoint.format == "safetensors"
    assert checkpoint.config == {"model_type": "llama", "hidden_size": 16, "torch_dtype": "bfloat16", "new": 1}
    assert checkpoint.generation_config == {"eos_token_id": 3}
    assert torch.equal(torch.as_tensor(checkpoint.weights.load(NAME)), torch.ones(4, 8))


def test_gguf_file_folder_and_overrides(gguf_models: Any, folder: Path) -> None:
    v = np.full((32, 64), 2, dtype=np.float32)
    path = gguf_models.llama({"blk.0.attn_v.weight": v})
    for model in (path, path.parent):
        checkpoint = open_checkpoint(ModelConfig(model=str(model), overrides={"rope_theta": 5.0}))
        assert (checkpoint.format, checkpoint.path) == ("gguf", path)
        assert checkpoint.config["rope_theta"] == 5.0
        assert torch.equal(torch.as_tensor(checkpoint.weights.load(NAME)), torch.from_numpy(v))
    # A folder with both is read as safetensors, unless asked otherwise.
    both = path.rename(folder / "m.gguf")
    assert open_checkpoint(ModelConfig(model=str(folder))).format == "safetensors"
    checkpoint = open_checkpoint(ModelConfig(model=str(folder), load_format="gguf"))
    assert (checkpoint.format, checkpoint.path) == ("gguf", both)


def test_dummy_weights_need_only_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(ModelConfig(model=str(folder), load_format="dummy", seed=4))
    assert checkpoint.format == "dummy"
    assert checkpoint.weights.require("a.weight", (2, 3)).dtype == torch.bfloat16
    chosen = ModelConfig(model=str(folder), load_format="dummy", dtype="float32")
    assert open_checkpoint(chosen).weights.require("a.weight", (2, 3)).dtype == torch.float32


def test_names_that_are_not_here_say_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDPOINT_HOME", str(tmp_path))
    for name in ("smollm2", "Qwen/Qwen3-0.6B", "some/repo:Q4_K_M"):
        with pytest.raises(ModelNotFound) as caught:
            open_checkpoint(ModelConfig(model=name))
        assert str(caught.value).endswith(f"hardpoint pull {name}")
    with pytest.raises(ModelNotFound, match=r"'\./nothing'"):
        open_checkpoint(ModelConfig(model="./nothing"))


def test_what_cannot_be_opened(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--load-format"):
        open_checkpoint(ModelConfig(model=str(folder), load_format="zip"))
    with pytest.raises(WeightsError, match=r"is no \.gguf file"):
        open_checkpoint(ModelConfig(model=str(folder), load_format="gguf"))
    with pytest.raises(WeightsError, match="neither a folder nor a GGUF file"):
        open_checkpoint(ModelConfig(model=str(folder / "config.json")))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        open_checkpoint(ModelConfig(model=str(folder)))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no 'model_type'"):
        open_checkpoint(ModelConfig(model=str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        open_checkpoint(ModelConfig(model=str(folder)))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=r"bad\.gguf"):
        open_checkpoint(ModelConfig(model=str(tmp_path / "bad.gguf")))
