"""A folder of safetensors: one file, or shards under an index. Headers are read at once, tensors mapped when asked.

With an index only the files that it names are read; what else lies in the folder (an older `model.safetensors`, pickled
weights) is left alone. Without one, `model.safetensors` is the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hardpoint.errors import WeightsError
from hardpoint.weights.source import WeightSource
from hardpoint_platforms.ops.contract import Weight, WeightSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

#: The header's dtype names, of which only the floats can be weights.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_PLAIN = ("F64", "F32", "F16", "BF16")


class SafetensorsSource(WeightSource):
    """The weights of a folder. Tensors are views of the mapped files: they cost no memory until they are touched."""

    def __init__(self, folder: Path) -> None:
        """Open the files and read their headers.

        Raises WeightsError for a folder without weights, a shard that is missing, an index that does not fit its
        shards, or a file that is cut off or no safetensors.
        """
        self._folder = folder
        self._handles: dict[str, Any] = {}
        self._tensors: dict[str, frozenset[str]] = {}
        self._files: dict[str, str] = {}
        index = folder / INDEX
        if index.exists():
            self._open_shards(_read_index(index))
        elif (folder / SINGLE).exists():
            self._add_file(SINGLE)
        else:
            raise WeightsError(_nothing_there(folder), hint=f"{folder} must hold {SINGLE}, or shards with {INDEX}")

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def spec(self, name: str) -> WeightSpec:
        part = self._slice(name)
        word = part.get_dtype()
        if word not in _DTYPES:
            raise WeightsError(f"{self.describe(name)}: dtype {word} is not known")
        return WeightSpec(tuple(part.get_shape()), _DTYPES[word])

    def require(self, name: str, shape: tuple[int, ...]) -> WeightSpec:
        spec = super().require(name, shape)
        word = self._slice(name).get_dtype()
        if word not in _PLAIN:
            raise WeightsError(
                f"{self.describe(name)}: dtype {word}; weights must be one of {', '.join(_PLAIN)}",
                hint="quantized weights need scales and a 'quantization_config' in config.json: download it all again",
            )
        return spec

    def load(self, name: str) -> Weight:
        try:
            tensor: torch.Tensor = self._handles[self._file(name)].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise WeightsError(f"{self.describe(name)}: cannot be read: {error}") from error
        return tensor

    def describe(self, name: str) -> str:
        return f"{self._folder / self._files.get(name, '')}, tensor {name!r}"

    def close(self) -> None:
        self._handles.clear()
        self._files.clear()

    def _slice(self, name: str) -> Any:
        return self._handles[self._file(name)].get_slice(name)

    def _file(self, name: str) -> str:
        try:
            return self._files[name]
        except KeyError:
            files = ", ".join(sorted(self._handles))
            raise WeightsError(
                f"{self._folder}: tensor {name!r} is in none of {files}",
                hint="the download is incomplete, or config.json belongs to another model",
            ) from None

    def _open_shards(self, weight_map: dict[str, str]) -> None:
        for file in sorted(set(weight_map.values())):
            self._add_file(file)
        for name, file in weight_map.items():
            if name not in self._tensors[file]:
                raise WeightsError(
                    f"{self._folder / file}: {INDEX} puts tensor {name!r} there, but it is not",
                    hint="the index belongs to other shards, or a shard was replaced: download the model again",
                )
            self._files[name] = file

    def _add_file(self, file: str) -> None:
        path = self._folder / file
        try:
            handle: Any = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError as error:
            raise WeightsError(
                f"{path}: {INDEX} names this shard, but it is missing", hint="download the model again"
            ) from error
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{path}: cut off or no safetensors file: {error}", hint="download the file again"
            ) from error
        self._handles[file] = handle
        self._tensors[file] = frozenset(handle.keys())
        for name in self._tensors[file]:
            self._files.setdefault(name, file)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name. Raises WeightsError for anything else, and for files outside the folder."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}", hint="download the file again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: has no 'weight_map' from tensors to files", hint="download the file again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(f"{path}: 'weight_map' puts tensor {name!r} into {file!r}, which is no plain file name")
    return weight_map


def _nothing_there(folder: Path) -> str:
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if shards:
        return f"{folder}: {', '.join(shards[:4])} but no {INDEX} that says what lies where"
    if pickled:
        return f"{folder}: only pickled weights ({', '.join(pickled[:4])}), which are not read: they can run code"
    return f"{folder}: no weights"
