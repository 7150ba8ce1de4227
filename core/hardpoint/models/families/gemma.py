"""Gemma 2 and Gemma 3: norms of (1 + weight) before and after each block, a scaled embedding, mixed windows.

Gemma 3 rotates its sliding layers with another base; its conditional (image) checkpoints hold the same text model one
level deeper.
"""

from __future__ import annotations

from dataclasses import replace

from hardpoint.errors import UnsupportedArchitecture
from hardpoint.models import rope
from hardpoint.models.families import reading
from hardpoint.models.fields import Fields
from hardpoint.models.spec import ModelSpec, Names, NormSpec, RopeSpec

_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_GEMMA2_NAMES = Names(
    post_attention="post_attention_layernorm",
    pre_ffn="pre_feedforward_layernorm",
    post_ffn="post_feedforward_layernorm",
)
_GEMMA3_NAMES = replace(
    _GEMMA2_NAMES,
    prefixes=("model.", "language_model.model.", "model.language_model.", ""),
    heads=("lm_head", "language_model.lm_head"),
)


def _model(
    fields: Fields,
    length: int,
    types: tuple[str, ...],
    ropes: dict[str, RopeSpec | None],
    names: Names,
    qk_norm: NormSpec | None,
) -> ModelSpec:
    if fields.flag("use_bidirectional_attention"):
        raise UnsupportedArchitecture("config.json: 'use_bidirectional_attention' makes this an encoder, not a decoder")
    bias = fields.optional_flag("attention_bias")
    layers = tuple(
        reading.attention(
            fields,
            rope=ropes[kind],
            window=window,
            scale=fields.number("query_pre_attn_scalar") ** -0.5,
            softcap=fields.optional_number("attn_logit_softcapping"),
            qk_norm=qk_norm,
            qkv_bias=bias,
            out_bias=bias,
        )
        for kind, window in zip(types, reading.windows(fields, types, length), strict=True)
    )
    block = reading.mlp(fields, key="hidden_activation")
    return reading.decoder(
        fields,
        layers,
        lambda _: block,
        norm_spec=reading.norm(fields, "rms1p"),
        names=names,
        embed_scale=fields.integer("hidden_size") ** 0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _gemma2(fields: Fields, length: int) -> ModelSpec:
    types = reading.layer_types(fields, lambda layer: reading.FULL if layer % 2 else reading.SLIDING)
    one = reading.plain_rope(fields, reading.head_dim(fields), length)
    return _model(fields, length, types, dict.fromkeys(rope.LAYER_TYPES, one), _GEMMA2_NAMES, None)


def _gemma3(fields: Fields, length: int) -> ModelSpec:
    pattern = fields.integer("sliding_window_pattern")
    types = reading.layer_types(fields, lambda layer: reading.SLIDING if (layer + 1) % pattern else reading.FULL)
    ropes = {kind: _gemma3_rope(fields, kind, length) for kind in rope.LAYER_TYPES}
    return _model(fields, length, types, ropes, _GEMMA3_NAMES, reading.norm(fields, "rms1p"))


def _gemma3_rope(fields: Fields, kind: str, length: int) -> RopeSpec | None:
    """Flat parameters belong to the full layers; the sliding ones have `rope_local_base_freq` and no scaling."""
    newer = fields.section("rope_parameters")
    if kind == reading.SLIDING and reading.SLIDING not in newer:
        local = fields.optional_number("rope_local_base_freq") or _LOCAL_THETA
        plain = {"rope_theta": local, "max_position_embeddings": fields.integer("max_position_embeddings")}
        found = rope.parameters(Fields(plain, {}))
    else:
        theta = _LOCAL_THETA if kind == reading.SLIDING else _GLOBAL_THETA
        found = rope.parameters(fields, kind, theta)
    return None if found is None else rope.rope_spec(found, reading.head_dim(fields), length)


def _gemma3_context(fields: Fields) -> int:
    """`max_position_embeddings`: Gemma 3's already counts its linear scaling in."""
    return fields.integer("max_position_embeddings")


FAMILIES = (
    reading.Family(
        name="Gemma 2",
        model_types=("gemma2",),
        architectures=("Gemma2ForCausalLM",),
        defaults={
            **_DEFAULTS,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        spec=_gemma2,
        context=reading.plain_context,
    ),
    reading.Family(
        name="Gemma 3",
        model_types=("gemma3_text", "gemma3"),
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        defaults={
            **_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
        },
        spec=_gemma3,
        context=_gemma3_context,
        section="text_config",
    ),
)
