"""Which model is meant: a shape that ships as data, a config.json, a folder, a GGUF file or a pulled model's name.

No weights are read: of a GGUF file only the table of tensors, for the bytes of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint.errors import ConfigError, ModelNotFound
from hardpoint.simulate.shape import WEIGHT_FORMATS, ModelShape, WeightFormat, shape_of
from hardpoint.weights.formats import is_gguf, read_json
from hardpoint.weights.store import resolve

SHAPES = Path(__file__).with_name("shapes")


def shape_names() -> list[str]:
    """Models whose dimensions ship with the simulator."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def load_model(
    name: str, *, weights: str = "auto", max_model_len: int | None = None
) -> tuple[ModelShape, WeightFormat]:
    """The shape of a model, and how its weights are kept.

    weights: a name of `WEIGHT_FORMATS`, or auto for what config or file say. max_model_len: longest sequence; None
    takes the model's. Raises ModelNotFound, ConfigError, ModelError or UnsupportedArchitecture.
    """
    from hardpoint.models.registry import find_family  # torch; the list of shapes does without

    config, found = read_config(name)
    family = find_family(config)
    fields = family.fields(config)
    context = family.context(fields)
    length = context if max_model_len is None else max_model_len
    if not 0 < length <= context:
        raise ConfigError(f"--max-model-len {length} is outside 1..{context}, the context of {name}")
    if weights == "auto":
        kept = found or _format_of(config)
    elif weights in WEIGHT_FORMATS:
        kept = WEIGHT_FORMATS[weights]
    else:
        raise ConfigError(f"--weights is {weights!r}; known are auto, {', '.join(WEIGHT_FORMATS)}")
    return shape_of(Path(name).name or name, family.spec(fields, length), length), kept


def activation_dtype(weights: WeightFormat) -> str:
    """In which activations are kept: as the weights where these are plain floats, else bfloat16."""
    return weights.name if weights.name in ("float32", "float16") else "bfloat16"


def read_config(name: str) -> tuple[dict[str, Any], WeightFormat | None]:
    """The config of a model, and how its weights are kept where a file says so. Raises ModelNotFound, ModelError."""
    if name in shape_names():
        return read_json(SHAPES / f"{name}.json", required=True), None
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return read_json(path, required=True), None
    try:
        path = resolve(name)
    except ModelNotFound as error:
        raise ModelNotFound(error.message, hint=f"shapes that need no model: {', '.join(shape_names())}") from None
    if is_gguf(path):
        return _read_gguf(path)
    return read_json(path / "config.json", required=True), None


def _read_gguf(path: Path) -> tuple[dict[str, Any], WeightFormat]:
    from hardpoint.weights.gguf.config import config_of
    from hardpoint.weights.gguf.split import open_gguf

    gguf = open_gguf(path)
    try:
        head_name = "output.weight" if "output.weight" in gguf.tensors else "token_embd.weight"
        body = [
            info
            for info in gguf.tensors.values()
            if len(info.shape) > 1 and info.name not in ("output.weight", "token_embd.weight")
        ]
        size, numbers = sum(info.nbytes for info in body), sum(_elements(info.shape) for info in body)
        head = gguf.tensors[head_name]
        kinds = sorted({info.type.name for info in body})
        bits, head_bits = 8.0 * size / numbers, 8.0 * head.nbytes / _elements(head.shape)
        return config_of(gguf), WeightFormat("+".join(kinds), bits, head_bits)
    finally:
        gguf.close()


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _format_of(config: Mapping[str, Any]) -> WeightFormat:
    """By `quantization_config`, else by the dtype that the config names; bfloat16 where it names none."""
    section = config.get("text_config")
    own: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        method, bits = str(quantization.get("quant_method", "")), quantization.get("bits")
        if "fp8" in method:
            return WEIGHT_FORMATS["float8"]
        if isinstance(bits, int) and 1 <= bits <= 8:
            group = quantization.get("group_size")
            columns = group if isinstance(group, int) and group > 0 else 128
            return WeightFormat(method or f"int{bits}", bits + (16 + bits) / columns, 16.0)
        raise ConfigError(
            f"config.json: 'quantization_config' says {method!r}, of which the bits per weight are not known",
            hint=f"say it: --weights {'|'.join(WEIGHT_FORMATS)}",
        )
    words = (config.get("dtype"), config.get("torch_dtype"), own.get("dtype"), own.get("torch_dtype"))
    return next(
        (WEIGHT_FORMATS[word] for word in words if isinstance(word, str) and word in WEIGHT_FORMATS),
        WEIGHT_FORMATS["bfloat16"],
    )
