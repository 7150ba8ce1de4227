"""Opening a model, whatever its format: config, generation config and a source of weights.

A folder with config.json and safetensors, a folder with one GGUF model, a .gguf file, any part of a split one, or a
name that the model store knows. Nothing is downloaded here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hardpoint.config.engine import ModelConfig
from hardpoint.errors import ConfigError, ModelError, WeightsError
from hardpoint.weights.formats import LOAD_FORMATS, is_gguf, read_json
from hardpoint.weights.source import Checkpoint, WeightSource
from hardpoint.weights.store import resolve


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """Open the model that a configuration names; `config.overrides` replace keys of its config.

    Raises ModelNotFound (with the command that fetches it), ConfigError, WeightsError or UnsupportedArchitecture.
    """
    if config.load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"--load-format is {config.load_format!r}; known are {', '.join(LOAD_FORMATS)}",
        )
    path = resolve(config.model)
    if is_gguf(path, config.load_format):
        return _open_gguf(path, config)
    if config.load_format == "gguf":
        raise WeightsError(f"{path}: --load-format gguf, but it is no .gguf file and holds none")
    return _open_folder(path, config)


def _open_gguf(path: Path, config: ModelConfig) -> Checkpoint:
    from hardpoint.weights.gguf.config import config_of, generation_config_of
    from hardpoint.weights.gguf.source import GGUFSource
    from hardpoint.weights.gguf.split import open_gguf

    gguf = open_gguf(path)
    try:
        values = {**config_of(gguf), **config.overrides}
        generation = generation_config_of(gguf)
        if config.load_format == "dummy":
            gguf.close()
            return Checkpoint(gguf.path, values, generation, _dummy(values, config), "dummy")
        return Checkpoint(gguf.path, values, generation, GGUFSource(gguf), "gguf")
    except BaseException:
        gguf.close()
        raise


def _open_folder(path: Path, config: ModelConfig) -> Checkpoint:
    if path.is_file():
        raise WeightsError(
            f"{path}: is neither a folder nor a GGUF file",
            hint="name the folder that holds config.json, or a .gguf file",
        )
    values = {**read_json(path / "config.json", required=True), **config.overrides}
    if not isinstance(values.get("model_type"), str):
        raise ModelError(f"{path / 'config.json'}: has no 'model_type'")
    generation = read_json(path / "generation_config.json")
    from hardpoint.weights.quantized.registry import find_method, open_quantized

    method = find_method(path, values)
    if config.load_format == "dummy":
        if method is not None:
            raise ConfigError(
                "--load-format dummy makes plain weights, but config.json has a 'quantization_config'",
                hint="take it out: --override quantization_config=null",
            )
        return Checkpoint(path, values, generation, _dummy(values, config), "dummy")
    from hardpoint.weights.safetensors import SafetensorsSource

    source = SafetensorsSource(path)
    return Checkpoint(
        path, values, generation, open_quantized(source, path, method) if method else source, "safetensors"
    )


def _dummy(values: dict[str, Any], config: ModelConfig) -> WeightSource:
    import torch

    from hardpoint.weights.dummy import DummySource

    words = (config.dtype, values.get("torch_dtype"), values.get("dtype"))
    named = [getattr(torch, word) for word in words if isinstance(word, str) and hasattr(torch, word)]
    dtype = next((dtype for dtype in named if isinstance(dtype, torch.dtype)), torch.float32)
    return DummySource(config.seed, dtype)
