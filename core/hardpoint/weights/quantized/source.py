"""A checkpoint whose weights lie in several tensors each, as a source of whole weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from hardpoint.errors import WeightsError
from hardpoint.weights.quantized.method import Layout, Method, Stored
from hardpoint.weights.source import WeightSource
from hardpoint_platforms.ops.contract import Weight, WeightSpec

log = logging.getLogger(__name__)

#: Tensors beside the weights that are not used: scales of inputs, of outputs and of the KV cache.
_BESIDE = re.compile(
    r"(?:^|\.)(?:input|output|activation|q|k|v|kv|prob)_(?:(?:global_)?scale(?:_ub|_inv)?|zero_point)$"
)
#: Parts without which others are no weight.
_VALUES = {"values", "packed"}


class QuantizedSource(WeightSource):
    """Weights under the names that a model asks for, whichever tensors of `files` they are made of.

    What tensors there are says which weights are quantized; the rest comes from `files` as it is.
    """

    def __init__(self, files: WeightSource, folder: Path, method: Method) -> None:
        self._files = files
        self._method = method
        self._layouts: dict[str, Layout] = {}
        self._names, self._stored = self._sort()
        beside = [name for name in files.names() if _BESIDE.search(name)]
        notes = method.notes()
        if beside:
            notes.append(f"{len(beside)} scales of inputs, outputs or the KV cache are not used, as {beside[0]!r}")
        for note in notes:
            log.info("%s: %s", folder, note)

    def names(self) -> Iterable[str]:
        return self._names

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def spec(self, name: str) -> WeightSpec:
        stored = self._stored.get(name)
        if stored is None:
            return self._files.spec(name)
        if name not in self._layouts:
            self._layouts[name] = self._method.layout(stored)
        layout = self._layouts[name]
        return WeightSpec(layout.shape, torch.float32, layout.scheme)

    def require(self, name: str, shape: tuple[int, ...]) -> WeightSpec:
        if name in self._stored:
            return super().require(name, shape)
        dtype = self._files.spec(name).dtype
        if dtype.itemsize == 1 or not dtype.is_floating_point:
            raise WeightsError(
                f"{self._files.describe(name)}: dtype {dtype}, but its scales are missing",
                hint="the download is incomplete, or config.json belongs to another model",
            )
        return self._files.require(name, shape)

    def load(self, name: str) -> Weight:
        stored = self._stored.get(name)
        if stored is None:
            return self._files.load(name)
        self.spec(name)
        return self._method.read(stored, self._layouts[name])

    def describe(self, name: str) -> str:
        stored = self._stored.get(name)
        if stored is None:
            return self._files.describe(name)
        return self._files.describe(stored.parts[stored.any]) + (
            "" if name in stored.parts.values() else f", of {name!r}"
        )

    def close(self) -> None:
        self._files.close()

    def _sort(self) -> tuple[dict[str, None], dict[str, Stored]]:
        """Names of all weights, and those that several tensors make.

        Raises WeightsError where a weight is there plain as well as in parts.
        """
        method, names = self._method, dict.fromkeys(n for n in self._files.names() if not _BESIDE.search(n))
        parts: dict[str, dict[str, str]] = {}
        for tensor in names:
            for end, part in method.ends.items():
                if tensor.endswith(end):
                    parts.setdefault(tensor.removesuffix(end) + method.named, {})[part] = tensor
                    break
        for name, found in list(parts.items()):
            if name not in names:
                if not name.endswith(".weight") and not _VALUES.intersection(found):
                    del parts[name]  # something that is called a scale, of no weight
                continue
            if method.own is None or "packed" in found:
                other = next(iter(found.values()))
                raise WeightsError(
                    f"{self._files.describe(name)}: is there plain, and quantized as {other!r} too",
                    hint="the folder holds two models, or a download is mixed up: download it again",
                )
            found[method.own] = name
        for found in parts.values():
            for tensor in found.values():
                names.pop(tensor, None)
        return names | dict.fromkeys(parts), {name: Stored(name, found, self._files) for name, found in parts.items()}
