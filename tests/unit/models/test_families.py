"""Configs become specs: missing keys get the model type's defaults, bad ones are named, unknown models are refused."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint.errors import ConfigError, UnsupportedArchitecture
from hardpoint.models.registry import FAMILIES, find_family, model_context
from hardpoint.models.spec import AttentionSpec, MLPSpec, ModelSpec, MoESpec


def _spec(config: dict[str, Any], length: int = 1024) -> ModelSpec:
    family = find_family(config)
    return family.spec(family.fields(config), length)


def _attention(spec: ModelSpec, layer: int = 0) -> AttentionSpec:
    attention = spec.layers[layer].attention
    assert isinstance(attention, AttentionSpec)
    return attention


def test_smollm2() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    }
    spec = _spec(config)
    assert (len(spec.layers), spec.hidden_size, spec.tied, spec.norm.eps) == (30, 576, True, 1e-5)
    attention = _attention(spec)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (9, 3, 64)
    assert attention.rope is not None
    assert attention.rope.inv_freq[1] == pytest.approx(100000 ** (-2 / 64))
    assert model_context(config) == 8192


def test_a_window_no_shorter_than_the_longest_sequence_is_none() -> None:
    config = {"model_type": "mistral", "sliding_window": 4096}
    assert _attention(_spec(config, 4096)).window is None
    assert _attention(_spec(config, 8192)).window == 4096
    assert _attention(_spec({"model_type": "mistral", "sliding_window": None}, 8192)).window is None


def test_qwen_slides_only_where_it_says_so() -> None:
    config = {"model_type": "qwen2", "num_hidden_layers": 4, "max_window_layers": 2, "sliding_window": 64}
    assert {_attention(_spec(config), layer).window for layer in range(4)} == {None}
    config["use_sliding_window"] = True
    assert [_attention(_spec(config), layer).window for layer in range(4)] == [None, None, 64, 64]


def test_gemma3_pattern_bases_and_depth() -> None:
    text = {"num_hidden_layers": 12, "sliding_window_pattern": 6, "sliding_window": 32}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    spec = _spec(config)
    assert [_attention(spec, layer).window for layer in (0, 4, 5, 11)] == [32, 32, None, None]
    local, glob = _attention(spec, 0).rope, _attention(spec, 5).rope
    assert local is not None
    assert glob is not None
    assert local.inv_freq[1] == pytest.approx(10_000 ** (-2 / 256))
    assert glob.inv_freq[1] == pytest.approx(1_000_000 ** (-2 / 256))
    # the linear scaling is already counted in
    assert (
        model_context(config | {"text_config": text | {"rope_scaling": {"rope_type": "linear", "factor": 8}}}) == 131072
    )


def test_which_layers_are_sparse() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}
    kinds = [type(layer.ffn) for layer in _spec(config).layers]
    assert kinds == [MLPSpec, MoESpec, MLPSpec, MoESpec]
    config = {"model_type": "deepseek_v2", "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_experts_per_tok": 6}
    kinds = [type(layer.ffn) for layer in _spec(config).layers]
    assert kinds == [MLPSpec, MoESpec, MoESpec]


def test_every_family_reads_a_config_of_defaults_alone() -> None:
    for family in FAMILIES:
        config: dict[str, Any] = {"model_type": family.model_types[0], "num_experts_per_tok": 2}
        assert model_context(config) == family.defaults["max_position_embeddings"]
        assert len(_spec(config).layers) == family.defaults["num_hidden_layers"]


def test_architecture_names_help_where_the_model_type_is_new() -> None:
    config = {"model_type": "llama_remix", "architectures": ["LlamaForCausalLM"]}
    assert find_family(config).name == "Llama"


def test_an_unknown_architecture_is_refused_with_what_there_is() -> None:
    with pytest.raises(UnsupportedArchitecture) as caught:
        find_family({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    message = str(caught.value)
    assert "'mamba'" in message
    assert "Qwen3-MoE (qwen3_moe)" in message
    assert "planned" in message


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "llama", "hidden_size": None}, "hidden_size"),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "num_key_value_heads"),
        ({"model_type": "llama", "hidden_act": "snake"}, "hidden_act"),
        ({"model_type": "llama", "rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"model_type": "llama", "tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 26}, "layer_types"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "topk_method": "noaux_tc"}, "topk_method"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "num_experts_per_tok"),
    ],
)
def test_a_bad_key_is_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        _spec(config)


def test_an_encoder_in_decoders_clothes_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="use_bidirectional_attention"):
        _spec({"model_type": "gemma3_text", "use_bidirectional_attention": True})
