"""Fixtures of quantized checkpoints: a tiny model, written in a format, beside the plain model that it stands for."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hardpoint.config.engine import ModelConfig
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.weights.source import Checkpoint

if (HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, HERE)

from formats import Format, Pair, rounded_inputs, write_pair


@pytest.fixture(scope="session")
def opened() -> Callable[[Path], Checkpoint]:
    """A folder as the engine opens it."""
    return lambda folder: open_checkpoint(ModelConfig(str(folder)))


@pytest.fixture(scope="session")
def write(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """write(model_type, format, **overrides of the config) -> Pair; equal ones are written once."""
    made: dict[Any, Pair] = {}

    def write(model_type: str, form: Format, shard: str = "5GB", **overrides: Any) -> Pair:
        key = (model_type, form.name, shard, repr(overrides))
        if key not in made:
            _, saved = make_model(model_type, **overrides)
            made[key] = write_pair(saved, tmp_path_factory.mktemp(form.name), form, shard != "5GB")
        return made[key]

    return write


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path, Any], Path]:
    """copy(folder, change): a copy of a checkpoint of one file, changed by change(tensors, config)."""
    from safetensors.torch import load_file

    def copy(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
        damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
        tensors, config = load_file(damaged / "model.safetensors"), json.loads((damaged / "config.json").read_text())
        change(tensors, config)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, damaged / "model.safetensors")
        (damaged / "config.json").write_text(json.dumps(config))
        return damaged

    return copy


@pytest.fixture
def oracle() -> Callable[..., torch.Tensor]:
    """oracle(pair, tokens) -> float32 [T, V]: transformers on the plain weights, inputs rounded as the format says."""
    from transformers import AutoModelForCausalLM

    def logits(pair: Pair, tokens: torch.Tensor, round_inputs: bool = True) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(
            pair.plain, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad(), rounded_inputs(model, pair.form.rounding if round_inputs else None):
            return model(input_ids=tokens[None], use_cache=False).logits[0].float()

    return logits
