"""What the families share when they turn a config into a spec: heads, windows, activations, and the plain decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint.models import rope
from hardpoint.models.fields import Fields
from hardpoint.models.spec import (
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    Names,
    NormSpec,
    RopeSpec,
)

FULL, SLIDING = rope.LAYER_TYPES
#: Names of activations in configs, and the contract's.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Family:
    """One way to read a config.

    Attributes:
        name: for people.
        model_types, architectures: as config.json spells them.
        defaults: what transformers assumes for keys that the config leaves out.
        spec: the decoder for sequences of up to `length` tokens.
        context: the longest sequence that the model is made for.
        section: key of the text part in a config that also describes other parts.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    spec: Callable[[Fields, int], ModelSpec]
    context: Callable[[Fields], int]
    section: str | None = None

    def fields(self, config: Mapping[str, Any]) -> Fields:
        """The text part of a config, over the defaults."""
        if self.section is not None and isinstance(config.get(self.section), Mapping):
            config = config[self.section]
        return Fields(config, self.defaults)


def plain_context(fields: Fields) -> int:
    """`max_position_embeddings`, stretched where the rope scaling says so."""
    return rope.context_length(rope.parameters(fields), fields.integer("max_position_embeddings"))


def plain_rope(fields: Fields, head_dim: int, length: int, *, interleaved: bool = False) -> RopeSpec | None:
    """The one rope of a model without layer types."""
    found = rope.parameters(fields)
    return None if found is None else rope.rope_spec(found, head_dim, length, interleaved=interleaved)


def activation(fields: Fields, key: str = "hidden_act") -> str:
    """The contract's name of the config's activation. Raises ConfigError for one that is not known."""
    word = fields.raw(key)
    if word not in _ACTIVATIONS:
        raise ConfigError(f"config.json: {key!r} is {word!r}; known are {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[word]


def head_dim(fields: Fields) -> int:
    """`head_dim`, or the hidden size over the heads."""
    given = fields.optional_integer("head_dim")
    return given or fields.integer("hidden_size") // fields.integer("num_attention_heads")


def kv_heads(fields: Fields) -> int:
    """Key and value heads; as many as query heads where the config names none."""
    heads = fields.integer("num_attention_heads")
    kv = fields.optional_integer("num_key_value_heads") or heads
    if heads % kv:
        raise ConfigError(f"config.json: 'num_attention_heads' {heads} is no multiple of 'num_key_value_heads' {kv}")
    return kv


def windows(fields: Fields, types: tuple[str, ...], length: int) -> tuple[int | None, ...]:
    """Each layer's window from its layer type. A window that the longest sequence fits into is none."""
    if SLIDING not in types:
        return (None,) * len(types)
    window = fields.integer("sliding_window")
    return tuple(window if kind == SLIDING and window < length else None for kind in types)


def same_windows(fields: Fields, length: int) -> tuple[int | None, ...]:
    """`sliding_window` for every layer, where it is set."""
    types = (SLIDING if fields.has("sliding_window") else FULL,) * fields.integer("num_hidden_layers")
    return windows(fields, types, length)


def layer_types(fields: Fields, pattern: Callable[[int], str]) -> tuple[str, ...]:
    """`layer_types`, or `pattern` of the layer's number where the config lists none."""
    count = fields.integer("num_hidden_layers")
    listed = fields.layer_list("layer_types", count, rope.LAYER_TYPES)
    return listed or tuple(pattern(layer) for layer in range(count))


def mlp(fields: Fields, *, key: str = "hidden_act", bias: bool | None = False) -> MLPSpec:
    """The dense feed-forward block of `intermediate_size`."""
    return MLPSpec(fields.integer("intermediate_size"), activation(fields, key), bias)


def norm(fields: Fields, kind: str = "rms") -> NormSpec:
    """The model's norm."""
    return NormSpec(kind, fields.number("rms_norm_eps"))


def attention(fields: Fields, **deltas: Any) -> AttentionSpec:
    """Grouped-query attention with the scale 1 / sqrt(head_dim); `deltas` replace fields."""
    size = head_dim(fields)
    plain: dict[str, Any] = {
        "heads": fields.integer("num_attention_heads"),
        "kv_heads": kv_heads(fields),
        "head_dim": size,
        "scale": size**-0.5,
    }
    return AttentionSpec(**{**plain, **deltas})


def decoder(
    fields: Fields,
    attentions: tuple[Any, ...],
    ffn: Callable[[int], MLPSpec | MoESpec],
    *,
    norm_spec: NormSpec | None = None,
    names: Names | None = None,
    **deltas: Any,
) -> ModelSpec:
    """A decoder of one attention spec per layer and a feed-forward block per layer number."""
    return ModelSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=tuple(LayerSpec(spec, ffn(layer)) for layer, spec in enumerate(attentions)),
        norm=norm_spec or norm(fields),
        tied=fields.flag("tie_word_embeddings"),
        names=names or Names(),
        **deltas,
    )
