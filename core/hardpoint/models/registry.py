"""From a checkpoint to a model: finds the family, fixes the context, builds the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hardpoint.errors import ConfigError, UnsupportedArchitecture
from hardpoint.layers.shard import Shard
from hardpoint.models.base import CausalModel, ParameterBook
from hardpoint.models.decoder import Decoder
from hardpoint.models.families import deepseek, gemma, llama, phi, qwen
from hardpoint.models.families.reading import Family
from hardpoint.weights.source import Checkpoint
from hardpoint_platforms.binding import OpTable

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *qwen.FAMILIES,
    *gemma.FAMILIES,
    *phi.FAMILIES,
    *deepseek.FAMILIES,
)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config, by `model_type`, else by `architectures`.

    Raises UnsupportedArchitecture, naming what is supported.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures") or ()
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    for family in FAMILIES:
        if not set(family.architectures).isdisjoint(architectures):
            return family
    names = ", ".join(f"{family.name} ({', '.join(family.model_types)})" for family in FAMILIES)
    raise UnsupportedArchitecture(
        f"no native model for model_type {model_type!r}, architectures {list(architectures)}; supported: {names}",
        hint="a fallback that runs other architectures through transformers is planned, not there yet",
    )


def model_context(config: Mapping[str, Any]) -> int:
    """The longest sequence that the model is made for, in tokens: what `max_model_len` None means."""
    family = find_family(config)
    return family.context(family.fields(config))


def build_model(
    checkpoint: Checkpoint,
    ops: OpTable,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    layers: range | None = None,
    shard: Shard | None = None,
) -> tuple[CausalModel, ParameterBook]:
    """Bind every op and list every weight; nothing but headers is read.

    Args:
        checkpoint: config and weights.
        ops: binds op instances on the device.
        dtype: of activations and of plain weights.
        max_model_len: longest sequence served; fixes rope tables and windows. None takes the model's own.
        layers: the part of the model to build; None for all of it.
        shard: the part of these layers that one of several ranks has; None for all of them.

    Raises UnsupportedArchitecture, ConfigError (a key of config.json, or --max-model-len), WeightsError (a tensor that
    is missing or of another shape), UnsupportedOperation (an op that nobody takes).
    """
    config = checkpoint.config
    family = find_family(config)
    fields = family.fields(config)
    context = family.context(fields)
    length = context if max_model_len is None else max_model_len
    if not 0 < length <= context:
        raise ConfigError(
            f"--max-model-len {length} is outside 1..{context}, the context that this {family.name} model is made for",
            hint=f"use --max-model-len {context} or less",
        )
    book = ParameterBook(checkpoint.weights)
    return Decoder(family.spec(fields, length), ops, book, dtype, length, layers, shard), book


def model_layers(config: Mapping[str, Any]) -> int:
    """Layers of the model."""
    family = find_family(config)
    fields = family.fields(config)
    return len(family.spec(fields, family.context(fields)).layers)
