"""Telling a model's format from its files, and reading its small JSON files. Imports no torch, for the front end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hardpoint.errors import ModelError

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def is_gguf(path: Path, load_format: str = "auto") -> bool:
    """Whether a model's file or folder is to be read as GGUF. A folder that also has safetensors is read as those."""
    if path.is_file():
        return path.suffix == ".gguf" or _magic(path) == b"GGUF"
    if load_format == "safetensors" or not any(path.glob("*.gguf")):
        return False
    return load_format == "gguf" or not any(path.glob("*.safetensors"))


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object; {} where the file does not exist. Raises ModelError naming the file, also where it must exist."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ModelError(
                f"{path.parent}: has no {path.name}",
                hint="a model is a folder with config.json and .safetensors files, or a .gguf file",
            ) from None
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: is no JSON object")
    return content


def _magic(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened: {error.strerror}") from None
