"""A model in one GGUF file or in several: `m-00001-of-00003.gguf` ... and the metadata `split.no`, `split.count`.

Part 1 carries all metadata; `split.no` counts from 0; `split.tensors.count` is the number of tensors of all parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.errors import WeightsError
from hardpoint.weights.gguf.reader import GGUFFile, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


class GGUF:
    """An opened model: metadata of the first part, tensors of all.

    Attributes:
        path: the file, or part 1.
        metadata: see `GGUFFile`.
        tensors: by name.
    """

    def __init__(self, files: Iterable[GGUFFile]) -> None:
        self._files = tuple(files)
        first = self._files[0]
        self.path = first.path
        self.metadata: Mapping[str, Any] = first.metadata
        self._file_of = {name: file for file in self._files for name in file.tensors}
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for file in self._files for name, info in file.tensors.items()
        }

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The raw bytes of a tensor: uint8 [nbytes], read-only."""
        return self._file_of[name].data(self.tensors[name])

    def release(self, name: str) -> None:
        """Forget the pages of a tensor that was read: a loaded model needs its file no more."""
        self._file_of[name].release(self.tensors[name])

    def describe(self, name: str) -> str:
        """File, tensor and type, for messages."""
        return f"{self._file_of[name].path}: tensor {name!r} ({self.tensors[name].type.name})"

    def close(self) -> None:
        """Let go of all parts."""
        for file in self._files:
            file.close()


def open_gguf(path: Path) -> GGUF:
    """Open a file, any part of a split model, or a folder that holds one model.

    Raises WeightsError, naming the file, for a missing or foreign part and for everything that `GGUFFile` refuses.
    """
    if path.is_dir():
        path = find_gguf(path)
    opened: list[GGUFFile] = []
    try:
        for part in _parts(path):
            file = GGUFFile(part)
            opened.append(file)
        _check_parts(opened)
    except BaseException:
        for file in opened:
            file.close()
        raise
    return GGUF(opened)


def find_gguf(folder: Path) -> Path:
    """The one model among a folder's .gguf files (part 1 of a split one). Raises WeightsError for none or several."""
    models: dict[str, Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        # The vision half of a multimodal model lies in a file of its own.
        if file.name.startswith("mmproj"):
            continue
        part = _PART.match(file.name)
        models.setdefault(f"{part['stem']} of {part['count']}" if part else file.name, file)
    if not models:
        raise WeightsError(f"{folder}: holds no .gguf file")
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        raise WeightsError(f"{folder}: holds several models ({names})", hint="name one of the files")
    return next(iter(models.values()))


def _parts(path: Path) -> list[Path]:
    match = _PART.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise WeightsError(f"{path}: part {int(match['number'])} of {count} cannot be")
    parts = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise WeightsError(
            f"{path}: part of a model in {count} files; missing: {', '.join(missing)}",
            hint="put all parts into one folder",
        )
    return parts


def _number(file: GGUFFile, key: str) -> int | None:
    """A whole number of the metadata; None where it is absent. Raises WeightsError for anything else."""
    value = file.metadata.get(key)
    if value is None or type(value) is int:
        return value
    raise WeightsError(f"{file.path}: metadata {key!r} is {value!r}, not a whole number")


def _check_parts(files: list[GGUFFile]) -> None:
    count = _number(files[0], "split.count") or 1
    if len(files) == 1:
        if count > 1:
            raise WeightsError(
                f"{files[0].path}: is one of {count} parts, but its name does not end in -0000N-of-{count:05d}.gguf",
                hint="give the parts their original names back",
            )
        return
    architecture = str(files[0].metadata.get("general.architecture"))
    total = _number(files[0], "split.tensors.count")
    seen: set[str] = set()
    for number, file in enumerate(files):
        theirs = str(file.metadata.get("general.architecture", architecture))
        facts = {"split.no": number, "split.count": len(files), "split.tensors.count": total}
        for key, wanted in facts.items():
            found = _number(file, key)
            if found != wanted:
                raise WeightsError(
                    f"{file.path}: does not belong to {files[0].path.name}: its {key} is {found}, expected {wanted}"
                )
        if theirs != architecture or seen & file.tensors.keys():
            raise WeightsError(f"{file.path}: is a part of another model than {files[0].path.name}")
        seen |= file.tensors.keys()
    if len(seen) != total:
        raise WeightsError(f"{files[0].path}: its parts hold {len(seen)} tensors, split.tensors.count is {total}")
