"""GGUF models for the tests of this folder, written with the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

#: A tensor: plain values, or bytes of a quantized type as (type's name, uint8 [..., row bytes]).
Tensor = np.ndarray | tuple[str, np.ndarray]


class GGUFModels:
    """Writes model files into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, architecture: str, tensors: Mapping[str, Tensor], name: str = "m.gguf", **keys: Any) -> Path:
        """`keys` go under the architecture's name, with `__` for dots; `full_` keys as they are."""
        path = self.folder / name
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in keys.items():
            full = key.startswith("full_")
            self._add(
                writer, (key.removeprefix("full_") if full else f"{architecture}.{key}").replace("__", "."), value
            )
        for tensor_name, tensor in tensors.items():
            if isinstance(tensor, tuple):
                kind = gguf.GGMLQuantizationType[tensor[0]]
                writer.add_tensor(tensor_name, tensor[1], raw_dtype=kind)
            else:
                writer.add_tensor(tensor_name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    @staticmethod
    def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))

    def llama(self, extra: Mapping[str, Tensor] | None = None, *, architecture: str = "llama", **keys: Any) -> Path:
        """A model with an embedding, no layers of its own and the sizes that every architecture needs."""
        rng = np.random.default_rng(0)
        base: dict[str, Tensor] = {
            "token_embd.weight": rng.standard_normal((40, 64), dtype=np.float32),
            "output_norm.weight": rng.standard_normal(64, dtype=np.float32),
        }
        given: dict[str, Any] = {
            "block_count": 1,
            "context_length": 2048,
            "embedding_length": 64,
            "feed_forward_length": 96,
            "attention__head_count": 4,
            "attention__head_count_kv": 2,
            "attention__layer_norm_rms_epsilon": 1e-5,
            "rope__freq_base": 10000.0,
        }
        return self.write(architecture, {**base, **(extra or {})}, **{**given, **keys})


@pytest.fixture
def gguf_models(tmp_path: Path) -> GGUFModels:
    return GGUFModels(tmp_path)
