"""Small GGUF files, written with the `gguf` package, which is another implementation than ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

WriteFile = Callable[..., Path]


def write_gguf(path: Path, tensors: dict[str, np.ndarray], **metadata: object) -> Path:
    """A file of F32/F16 tensors and a few metadata values of each kind. Keys have `__` for dots."""
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """Three tensors, every kind of metadata."""
    rng = np.random.default_rng(0)
    return write_gguf(
        tmp_path / "small.gguf",
        {
            "token_embd.weight": rng.standard_normal((8, 32), dtype=np.float32),
            "blk.0.attn_norm.weight": rng.standard_normal(32, dtype=np.float32),
            "output.weight": rng.standard_normal((8, 32), dtype=np.float32).astype(np.float16),
        },
        llama__block_count=1,
        llama__epsilon=1e-5,
        some__flag=True,
        some__text="héllo 🎉",
        some__words=["a", "", "ünï", "🎉"],
        some__numbers=[1, 2, 3],
        some__nested=[[1, 2], [3, 4]],
    )
