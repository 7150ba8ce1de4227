"""Where weights come from: a file format behind two questions (what is there, give me one), under one set of names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.errors import WeightsError
from hardpoint_platforms.ops.contract import Weight, WeightSpec


class WeightSource(ABC):
    """Weights of one checkpoint, by the names that Hugging Face checkpoints of the architecture use.

    Opening reads headers only. A GGUF source renames and undoes what the converter did (row permutation of q and k,
    norms with one added), so that a model never knows which format it came from.
    """

    @abstractmethod
    def names(self) -> Iterable[str]:
        """All names."""

    @abstractmethod
    def spec(self, name: str) -> WeightSpec:
        """Shape, dtype, scheme without reading data. Raises WeightsError for a name that is not there."""

    @abstractmethod
    def load(self, name: str) -> Weight:
        """Read one weight into host memory (or map it). Raises WeightsError naming file and tensor."""

    @abstractmethod
    def describe(self, name: str) -> str:
        """File and tensor behind a name, for error messages."""

    def require(self, name: str, shape: tuple[int, ...]) -> WeightSpec:
        """The spec of a weight that a model cannot do without and whose shape it knows.

        Raises WeightsError, naming file and tensor, if it is missing, of another shape, or of a dtype that is
        neither a float's nor quantized.
        """
        spec = self.spec(name)
        if spec.shape != shape:
            raise WeightsError(
                f"{self.describe(name)}: shape is {list(spec.shape)}, the config asks for {list(shape)}",
                hint="config and weights do not belong together, or the file is damaged",
            )
        if spec.scheme is None and not spec.dtype.is_floating_point:
            raise WeightsError(
                f"{self.describe(name)}: dtype {spec.dtype} cannot hold plain weights",
                hint="quantized weights need scales and a 'quantization_config' in config.json: download it all again",
            )
        return spec

    def __contains__(self, name: str) -> bool:
        return name in set(self.names())

    def close(self) -> None:
        """Let go of files and mappings."""
        return


@dataclass(frozen=True)
class Checkpoint:
    """One opened model: its config in Hugging Face's spelling, its weights, and where its tokenizer lies.

    Attributes:
        path: folder or file.
        config: as in config.json; for GGUF made from the metadata. Always has "model_type".
        generation_config: as in generation_config.json, or empty.
        weights: None where only the config was asked for.
        format: safetensors, gguf or dummy.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    weights: WeightSource
    format: str
