"""Metadata -> config.json's spelling, per architecture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint.errors import UnsupportedArchitecture, WeightsError
from hardpoint.weights.gguf.config import config_of, generation_config_of
from hardpoint.weights.gguf.split import open_gguf

pytestmark = pytest.mark.reference


def config(path: Path) -> dict[str, Any]:
    return config_of(open_gguf(path))


def subset(values: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return {key: values.get(key) for key in wanted} == wanted


@pytest.mark.real_model
def test_the_real_models(smollm2_path: Path, gemma3_path: Path) -> None:
    smol = config(smollm2_path)
    assert subset(
        smol,
        {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "eos_token_id": [2],
            "attention_bias": False,
        },
    )
    gemma = config(gemma3_path)
    assert subset(
        gemma, {"model_type": "gemma3_text", "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512}
    )
    assert [i for i, kind in enumerate(gemma["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert gemma["rope_parameters"]["full_attention"] == {"rope_type": "default", "rope_theta": 1e6}
    assert gemma["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0


def test_plain_llama(gguf_models: Any) -> None:
    values = config(gguf_models.llama({"output.weight": np.ones((40, 64), np.float32)}, rope__dimension_count=16))
    assert subset(values, {"head_dim": 16, "vocab_size": 40, "tie_word_embeddings": False, "torch_dtype": "float32"})
    assert "rope_scaling" not in values


def test_values_per_layer_count_where_they_agree(gguf_models: Any) -> None:
    assert config(gguf_models.llama(attention__head_count_kv=[2, 2, 2]))["num_key_value_heads"] == 2
    with pytest.raises(WeightsError, match=r"llama\.attention\.head_count_kv"):
        config(gguf_models.llama(attention__head_count_kv=[2, 4]))


def test_qwen3_moe(gguf_models: Any) -> None:
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48, "attention__key_length": 32}
    wanted = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 32,
        "norm_topk_prob": True,
    }
    assert subset(config(gguf_models.llama(architecture="qwen3moe", **keys)), wanted)
    assert config(gguf_models.llama(architecture="qwen2moe", **keys))["norm_topk_prob"] is False


def test_mixtral_is_llama_with_experts(gguf_models: Any) -> None:
    values = config(gguf_models.llama(expert_count=8, expert_used_count=2))
    assert subset(values, {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})


def test_gemma2(gguf_models: Any) -> None:
    keys = {"attention__sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    values = config(gguf_models.llama(architecture="gemma2", block_count=4, attention__key_length=32, **keys))
    assert values["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert subset(
        values, {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    )
    large = config(gguf_models.llama(architecture="gemma2", block_count=46, attention__key_length=32, **keys))
    assert large["query_pre_attn_scalar"] == 16


def test_gemma3_patterns_and_scaling(gguf_models: Any) -> None:
    keys = {"attention__sliding_window": 16, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    values = config(gguf_models.llama(architecture="gemma3", block_count=6, **keys))
    assert values["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    full, local = (values["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    assert subset(full, {"rope_type": "linear", "factor": 8.0})
    assert local == {"rope_type": "default", "rope_theta": 10000.0}
    flags = config(
        gguf_models.llama(
            architecture="gemma3",
            block_count=2,
            attention__sliding_window=16,
            attention__sliding_window_pattern=[True, False],
        )
    )
    assert flags["layer_types"] == ["sliding_attention", "full_attention"]


def test_phi3_longrope(gguf_models: Any) -> None:
    factors = np.arange(1, 7, dtype=np.float32)
    tensors = {"rope_factors_long.weight": factors, "rope_factors_short.weight": factors / 2}
    keys = {
        "rope__dimension_count": 12,
        "rope__scaling__original_context_length": 512,
        "rope__scaling__attn_factor": 1.19,
        "attention__sliding_window": 64,
    }
    values = config(gguf_models.llama(tensors, architecture="phi3", **keys))
    assert subset(
        values, {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 512, "sliding_window": 64}
    )
    scaling = values["rope_scaling"]
    assert scaling["long_factor"] == factors.tolist()
    assert scaling["short_factor"] == (factors / 2).tolist()
    assert subset(scaling, {"rope_type": "longrope", "attention_factor": 1.19})


def llama3_factors(factor: float, low: float, high: float, original: int, theta: float, dim: int) -> np.ndarray:
    """As the converter writes them."""
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (i / dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_bands_are_recognized(gguf_models: Any, factor: float) -> None:
    tensors = {"rope_freqs.weight": llama3_factors(factor, 1, 4, 8192, 500000.0, 64)}
    values = config(gguf_models.llama(tensors, rope__freq_base=500000.0))
    wanted = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert values["rope_scaling"] == {"rope_type": "llama3", "factor": factor, **wanted}


def test_other_factors_become_equal_longrope_lists(gguf_models: Any) -> None:
    factors = llama3_factors(8.0, 2, 5, 4096, 500000.0, 64)
    values = config(gguf_models.llama({"rope_freqs.weight": factors}, rope__freq_base=500000.0))
    scaling = values["rope_scaling"]
    assert scaling["long_factor"] == scaling["short_factor"] == factors.tolist()
    assert subset(scaling, {"rope_type": "longrope", "attention_factor": 1.0})


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 512}),
        (
            {"scaling__type": "linear", "scaling__factor": 2.0},
            {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 1024},
        ),
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 512},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        ({"scaling__type": "none"}, None),
    ],
)
def test_rope_scaling(gguf_models: Any, keys: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    values = config(gguf_models.llama(**{f"rope__{key}": value for key, value in keys.items()}))
    assert values.get("rope_scaling") == wanted


def test_unknown_rope_scaling(gguf_models: Any) -> None:
    with pytest.raises(WeightsError, match=r"rope\.scaling\.type' is 'zigzag'"):
        config(gguf_models.llama(rope__scaling__type="zigzag"))


def test_deepseek2(gguf_models: Any) -> None:
    keys = {
        "attention__kv_lora_rank": 16,
        "attention__key_length": 24,
        "attention__value_length": 8,
        "rope__dimension_count": 8,
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 40.0,
        "rope__scaling__original_context_length": 4096,
        "rope__scaling__yarn_log_multiplier": 0.0707,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 32,
        "expert_weights_scale": 16.0,
        "leading_dense_block_count": 1,
    }
    values = config(gguf_models.llama(architecture="deepseek2", **keys))
    wanted = {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 16.0,
        "topk_method": "greedy",
    }
    assert subset(values, wanted)
    assert "q_lora_rank" in values
    assert subset(values["rope_scaling"], {"mscale": 0.707, "mscale_all_dim": 0.707})


def test_missing_keys_are_named(gguf_models: Any) -> None:
    path = gguf_models.write("llama", {"token_embd.weight": np.ones((4, 32), np.float32)})
    with pytest.raises(WeightsError, match=r"llama\.attention\.head_count' is missing"):
        config(path)
    with pytest.raises(WeightsError, match=r"no tensor 'token_embd\.weight'"):
        config(gguf_models.write("llama", {"output_norm.weight": np.ones(32, np.float32)}))
    with pytest.raises(UnsupportedArchitecture, match="mamba"):
        config(gguf_models.llama(architecture="mamba"))


def test_end_tokens_and_sampling_defaults(gguf_models: Any) -> None:
    keys = {"full_tokenizer__ggml__eos_token_id": 5, "full_tokenizer__ggml__eot_token_id": 7}
    path = gguf_models.llama(**keys, full_general__sampling__temp=0.5, full_general__sampling__top_k=20)
    assert config(path)["eos_token_id"] == [5, 7]
    assert generation_config_of(open_gguf(path)) == {"eos_token_id": [5, 7], "temperature": 0.5, "top_k": 20}
