"""Qwen2 (biases on q, k, v), Qwen3 (norms on q and k) and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from hardpoint.errors import ConfigError
from hardpoint.models.families import reading
from hardpoint.models.fields import Fields
from hardpoint.models.spec import AttentionSpec, MLPSpec, ModelSpec, MoESpec

_SHARED = {
    "vocab_size": 151936,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_attention_heads": 32,
}
_DENSE = {
    **_SHARED,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
}


def _attentions(fields: Fields, length: int, types: tuple[str, ...], **deltas: Any) -> tuple[AttentionSpec, ...]:
    rope = reading.plain_rope(fields, reading.head_dim(fields), length)
    return tuple(
        reading.attention(fields, rope=rope, window=window, **deltas)
        for window in reading.windows(fields, types, length)
    )


def _types(fields: Fields) -> tuple[str, ...]:
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return (reading.FULL,) * fields.integer("num_hidden_layers")
    first = fields.integer("max_window_layers", least=0)
    return reading.layer_types(fields, lambda layer: reading.SLIDING if layer >= first else reading.FULL)


def _qwen2(fields: Fields, length: int) -> ModelSpec:
    block = reading.mlp(fields)
    layers = _attentions(fields, length, _types(fields), qkv_bias=True)
    return reading.decoder(fields, layers, lambda _: block)


def _qwen3(fields: Fields, length: int) -> ModelSpec:
    block = reading.mlp(fields)
    bias = fields.optional_flag("attention_bias")
    layers = _attentions(fields, length, _types(fields), qk_norm=reading.norm(fields), qkv_bias=bias, out_bias=bias)
    return reading.decoder(fields, layers, lambda _: block)


def _qwen3_moe(fields: Fields, length: int) -> ModelSpec:
    bias = fields.optional_flag("attention_bias")
    sliding = fields.flag("use_sliding_window") and fields.has("sliding_window")
    types = (reading.SLIDING if sliding else reading.FULL,) * fields.integer("num_hidden_layers")
    layers = _attentions(fields, length, types, qk_norm=reading.norm(fields), qkv_bias=bias, out_bias=bias)
    dense = fields.raw("mlp_only_layers") or ()
    step = fields.integer("decoder_sparse_step")
    block = reading.mlp(fields)
    key = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    moe = MoESpec(
        experts=fields.integer(key),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate=fields.integer("moe_intermediate_size"),
        activation=reading.activation(fields),
        renormalize=fields.flag("norm_topk_prob"),
    )
    if moe.top_k > moe.experts:
        raise ConfigError(f"config.json: 'num_experts_per_tok' {moe.top_k} is more than {key!r} {moe.experts}")

    def ffn(layer: int) -> MLPSpec | MoESpec:
        return block if layer in dense or (layer + 1) % step else moe

    return reading.decoder(fields, layers, ffn)


FAMILIES = (
    reading.Family(
        name="Qwen2",
        model_types=("qwen2",),
        architectures=("Qwen2ForCausalLM",),
        defaults=_DENSE,
        spec=_qwen2,
        context=reading.plain_context,
    ),
    reading.Family(
        name="Qwen3",
        model_types=("qwen3",),
        architectures=("Qwen3ForCausalLM",),
        defaults={**_DENSE, "head_dim": 128},
        spec=_qwen3,
        context=reading.plain_context,
    ),
    reading.Family(
        name="Qwen3-MoE",
        model_types=("qwen3_moe",),
        architectures=("Qwen3MoeForCausalLM",),
        defaults={
            **_SHARED,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
        },
        spec=_qwen3_moe,
        context=reading.plain_context,
    ),
)
