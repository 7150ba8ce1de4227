"""The quantization methods that are read, by the `quant_method` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint.errors import ModelError
from hardpoint.weights.formats import read_json
from hardpoint.weights.quantized.compressed import CompressedTensors
from hardpoint.weights.quantized.float8 import Float8, ModelOpt
from hardpoint.weights.quantized.gptq import Awq, Gptq
from hardpoint.weights.quantized.method import Method
from hardpoint.weights.quantized.mxfp4 import Mxfp4
from hardpoint.weights.quantized.source import QuantizedSource
from hardpoint.weights.source import WeightSource

METHODS: Mapping[str, type[Method]] = {
    "fp8": Float8,
    "fbgemm_fp8": Float8,
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "mxfp4": Mxfp4,
    "modelopt": ModelOpt,
}

#: Keys under which configs keep it; the second is older.
_KEYS = ("quantization_config", "compression_config")
_MODELOPT_FILE = "hf_quant_config.json"


def find_method(folder: Path, config: Mapping[str, Any]) -> Method | None:
    """How a model's weights are quantized; None: they are plain. A key that is null says that they are.

    Raises ModelError for a method that is not known, naming those that are, and for settings that are not read.
    """
    text = config.get("text_config")
    found: Any = None
    for section in (config, text if isinstance(text, Mapping) else {}):
        for key in _KEYS:
            found = found or section.get(key)
    if not found and not any(key in config for key in _KEYS):
        own = read_json(folder / _MODELOPT_FILE).get("quantization")
        found = {"quant_method": "modelopt", **own} if isinstance(own, Mapping) else None
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"{folder / 'config.json'}: 'quantization_config' says quant_method is {method!r}; read are "
            f"{', '.join(METHODS)}",
            hint="use another quantization of the model, the unquantized one, or a GGUF file of it",
        )
    return METHODS[method](found)


def open_quantized(files: WeightSource, folder: Path, method: Method) -> WeightSource:
    """The weights of `files`, read by `method`. Raises WeightsError."""
    return QuantizedSource(files, folder, method)
