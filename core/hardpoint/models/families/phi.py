"""Phi-3: q, k, v and gate, up lie fused in the checkpoint; long contexts through LongRoPE; partial rotation in some."""

from __future__ import annotations

from hardpoint.errors import ConfigError
from hardpoint.models import rope
from hardpoint.models.families import reading
from hardpoint.models.fields import Fields
from hardpoint.models.spec import ModelSpec, Names


def _phi3(fields: Fields, length: int) -> ModelSpec:
    size = reading.head_dim(fields)
    found = _parameters(fields)
    layers = tuple(
        reading.attention(fields, rope=None if found is None else rope.rope_spec(found, size, length), window=window)
        for window in reading.same_windows(fields, length)
    )
    block = reading.mlp(fields)
    return reading.decoder(fields, layers, lambda _: block, names=Names(qkv="qkv_proj", gate_up="gate_up_proj"))


def _parameters(fields: Fields) -> rope.RopeParameters | None:
    """Early checkpoints call their LongRoPE lists `su` or `yarn`."""
    found = rope.parameters(fields)
    if found is None or found.kind == "default":
        return found
    if found.kind not in ("yarn", "longrope"):
        raise ConfigError(f"config.json: '{found.key}.rope_type' is {found.kind!r}; Phi-3 knows default and longrope")
    return rope.RopeParameters(**{**vars(found), "kind": "longrope"})


def _context(fields: Fields) -> int:
    return fields.integer("max_position_embeddings")


FAMILIES = (
    reading.Family(
        name="Phi-3",
        model_types=("phi3",),
        architectures=("Phi3ForCausalLM",),
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        spec=_phi3,
        context=_context,
    ),
)
