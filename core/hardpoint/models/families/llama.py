"""Llama and what is built like it: SmolLM2, TinyLlama, Yi, Mistral (with its sliding window)."""

from __future__ import annotations

from hardpoint.models.families import reading
from hardpoint.models.fields import Fields
from hardpoint.models.spec import ModelSpec

_SHARED = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def _llama(fields: Fields, length: int) -> ModelSpec:
    rope = reading.plain_rope(fields, reading.head_dim(fields), length)
    bias = fields.optional_flag("attention_bias")
    layer = reading.attention(fields, rope=rope, qkv_bias=bias, out_bias=bias)
    block = reading.mlp(fields, bias=fields.optional_flag("mlp_bias"))
    return reading.decoder(fields, (layer,) * fields.integer("num_hidden_layers"), lambda _: block)


def _mistral(fields: Fields, length: int) -> ModelSpec:
    rope = reading.plain_rope(fields, reading.head_dim(fields), length)
    block = reading.mlp(fields)
    layers = tuple(
        reading.attention(fields, rope=rope, window=window) for window in reading.same_windows(fields, length)
    )
    return reading.decoder(fields, layers, lambda _: block)


FAMILIES = (
    reading.Family(
        name="Llama",
        model_types=("llama",),
        architectures=("LlamaForCausalLM",),
        defaults={**_SHARED, "intermediate_size": 11008, "max_position_embeddings": 2048},
        spec=_llama,
        context=reading.plain_context,
    ),
    reading.Family(
        name="Mistral",
        model_types=("mistral",),
        architectures=("MistralForCausalLM",),
        defaults={
            **_SHARED,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        spec=_mistral,
        context=reading.plain_context,
    ),
)
