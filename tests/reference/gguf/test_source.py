"""GGUF weights under checkpoint names: what the converter did is undone, whatever the types (S-24)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from hardpoint.errors import UnsupportedArchitecture, WeightsError
from hardpoint.weights.gguf.config import config_of
from hardpoint.weights.gguf.source import GGUFSource
from hardpoint.weights.gguf.split import open_gguf
from hardpoint_platforms.quant import QuantTensor

pytestmark = pytest.mark.reference
RNG = np.random.default_rng(7)


def source(path: Path) -> GGUFSource:
    return GGUFSource(open_gguf(path))


def values(weight: torch.Tensor | QuantTensor) -> np.ndarray:
    tensor = weight.dequantize() if isinstance(weight, QuantTensor) else weight
    return tensor.float().numpy()


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def packed(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    return name, quantize(array, gguf.GGMLQuantizationType[name])


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to q and k of Llama: row i of a head's first half stands before row i of its second."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "F32"])
def test_llama_q_and_k_come_back_in_order(gguf_models: Any, kind: str) -> None:
    q, k, v, bias = normal(64, 64), normal(32, 64), normal(32, 64), normal(64)
    tensors = {
        "blk.0.attn_q.weight": packed(kind, permuted(q, 4)),
        "blk.0.attn_k.weight": packed(kind, permuted(k, 2)),
        "blk.0.attn_v.weight": packed(kind, v),
        "blk.0.attn_q.bias": permuted(bias, 4),
    }
    weights = source(gguf_models.llama(tensors))
    for letter, wanted in (("q", q), ("k", k), ("v", v)):
        name = f"model.layers.0.self_attn.{letter}_proj.weight"
        loaded = weights.load(name)
        assert isinstance(loaded, QuantTensor) == kind.startswith("Q")
        assert np.array_equal(values(loaded), dequantize(*reversed(_typed(kind, wanted))))
        assert weights.spec(name).shape == wanted.shape
    assert np.array_equal(values(weights.load("model.layers.0.self_attn.q_proj.bias")), bias)


def _typed(kind: str, array: np.ndarray) -> tuple[gguf.GGMLQuantizationType, np.ndarray]:
    number = gguf.GGMLQuantizationType[kind]
    return number, quantize(array, number)


def test_qwen_rows_stay_as_they_are(gguf_models: Any) -> None:
    q = normal(64, 64)
    weights = source(gguf_models.llama({"blk.0.attn_q.weight": q}, architecture="qwen2"))
    assert np.array_equal(values(weights.load("model.layers.0.self_attn.q_proj.weight")), q)


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3"])
def test_gemma_norms_lose_the_one(gguf_models: Any, architecture: str) -> None:
    norm = normal(64)
    tensors = {"blk.0.attn_norm.weight": norm + 1, "blk.0.ffn_norm.weight": norm + 1}
    keys = {"attention__sliding_window": 8}
    weights = source(gguf_models.llama(tensors, architecture=architecture, **keys))
    ffn = "post_attention" if architecture == "gemma" else "pre_feedforward"
    for name in ("input_layernorm", f"{ffn}_layernorm"):
        assert np.allclose(values(weights.load(f"model.layers.0.{name}.weight")), norm, atol=1e-6)
    assert "model.norm.weight" in weights


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_experts_come_out_one_by_one(gguf_models: Any, kind: str) -> None:
    gate, down, router = normal(4, 32, 64), normal(4, 64, 32), normal(4, 64)
    tensors = {
        "blk.0.ffn_gate_exps.weight": packed(kind, gate),
        "blk.0.ffn_down_exps.weight": packed(kind, down),
        "blk.0.ffn_gate_inp.weight": router,
        "blk.0.ffn_gate_inp_shexp.weight": router[0],
    }
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    weights = source(gguf_models.llama(tensors, architecture="qwen2moe", **keys))
    assert np.array_equal(values(weights.load("model.layers.0.mlp.gate.weight")), router)
    assert values(weights.load("model.layers.0.mlp.shared_expert_gate.weight")).shape == (1, 64)
    assert weights.spec("model.layers.0.mlp.shared_expert_gate.weight").shape == (1, 64)
    for expert in range(4):
        prefix = f"model.layers.0.mlp.experts.{expert}."
        for part, whole in (("gate_proj", gate), ("down_proj", down)):
            name = f"{prefix}{part}.weight"
            assert np.array_equal(values(weights.load(name)), dequantize(*reversed(_typed(kind, whole[expert]))))
            assert weights.spec(name).shape == whole[expert].shape
            assert f"expert {expert}" in weights.describe(name)


def test_wrong_number_of_experts(gguf_models: Any) -> None:
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    path = gguf_models.llama({"blk.0.ffn_up_exps.weight": normal(4, 32, 64)}, architecture="qwen3moe", **keys)
    with pytest.raises(WeightsError, match=r"ffn_up_exps.*8 experts"):
        source(path)


DEEPSEEK = {
    "attention__kv_lora_rank": 16,
    "attention__key_length": 24,
    "attention__value_length": 8,
    "rope__dimension_count": 8,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}


def test_deepseek_kv_b_is_joined_where_the_file_has_it_in_halves(gguf_models: Any) -> None:
    heads, nope, value, latent = 4, 16, 8, 16
    kv_b = normal(heads, nope + value, latent)
    whole = {"blk.0.attn_kv_b.weight": kv_b.reshape(-1, latent)}
    halves = {
        "blk.0.attn_k_b.weight": np.ascontiguousarray(kv_b[:, :nope].swapaxes(1, 2)),
        "blk.0.attn_v_b.weight": np.ascontiguousarray(kv_b[:, nope:]),
    }
    mla = {**DEEPSEEK, "attention__key_length": 24, "attention__key_length_mla": 24, "attention__value_length_mla": 8}
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    for tensors, keys in ((whole, DEEPSEEK), (halves, mla)):
        weights = source(gguf_models.llama(tensors, architecture="deepseek2", **keys))
        assert np.array_equal(values(weights.load(name)), kv_b.reshape(-1, latent))
        assert weights.spec(name).shape == (heads * (nope + value), latent)
        assert not any("attn_" in other for other in weights.names())


def test_mixed_types_in_one_model(gguf_models: Any) -> None:
    """q in Q4_K, k in Q6_K, v in F16, gate Q8_0, up Q4_0, one IQ4_NL, one TQ1_0, embedding Q6_K."""

    def blocks(kind: str, rows: int, columns: int) -> tuple[str, np.ndarray]:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        data = RNG.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
        # a scale of any bits may be infinite: put 0.01 where these types keep theirs
        at = {"Q4_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "TQ1_0": (52,), "IQ2_XXS": (0,)}[kind]
        for place in at:
            data[..., place : place + 2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
        return kind, data.reshape(rows, -1)

    tensors: dict[str, Any] = {
        "token_embd.weight": blocks("Q6_K", 40, 256),
        "output_norm.weight": normal(256),
        "output.weight": packed("Q8_0", normal(40, 256)),
        "blk.0.attn_q.weight": blocks("Q4_K", 64, 256),
        "blk.0.attn_k.weight": blocks("Q6_K", 32, 256),
        "blk.0.attn_v.weight": normal(32, 256).astype(np.float16),
        "blk.0.ffn_gate.weight": packed("Q8_0", normal(96, 256)),
        "blk.0.ffn_up.weight": packed("Q4_0", normal(96, 256)),
        "blk.0.ffn_down.weight": blocks("IQ4_NL", 256, 96),
        "blk.0.attn_output.weight": blocks("TQ1_0", 256, 256),
        "blk.1.attn_output.weight": blocks("IQ2_XXS", 256, 256),
    }
    path = gguf_models.llama(tensors, architecture="qwen2", embedding_length=256)
    weights, file = source(path), gguf.GGUFReader(path)
    raw = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in file.tensors}
    for name in weights.names():
        tensor = weights.describe(name).split("'")[1]
        assert np.array_equal(values(weights.load(name)), raw[tensor].astype(np.float32)), name
        spec = weights.spec(name)
        assert spec.shape == raw[tensor].shape
        loaded = weights.load(name)
        assert (spec.scheme == loaded.scheme) if isinstance(loaded, QuantTensor) else spec.scheme is None
    assert weights.spec("model.layers.1.self_attn.o_proj.weight").scheme is None


def test_integers_are_refused_by_tensor_and_type(gguf_models: Any) -> None:
    path = gguf_models.llama({"blk.0.attn_q.weight": np.ones((64, 64), dtype=np.int8)})
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.weight' \(I8\)"):
        source(path)


def test_unknown_names_and_unknown_tensors(gguf_models: Any) -> None:
    weights = source(gguf_models.llama({"blk.0.extra.weight": normal(64), "vision.weight": normal(64)}))
    assert {"blk.0.extra.weight", "vision.weight"} < set(weights.names())
    for method in (weights.load, weights.spec, weights.describe):
        with pytest.raises(WeightsError, match="no tensor for 'nothing'"):
            method("nothing")


def test_unknown_architecture_says_what_there_is(gguf_models: Any) -> None:
    path = gguf_models.llama(architecture="clip")
    with pytest.raises(UnsupportedArchitecture, match=r"'clip'.*llama, qwen2"):
        source(path)


@pytest.mark.real_model
def test_smollm2_speaks_through_transformers_own_model(smollm2_path: Path) -> None:
    """The strongest check of names, row order and config: transformers' Llama on our weights knows France's capital."""
    _greedy_equals(smollm2_path, "LlamaForCausalLM", [504, 3575, 282, 4649, 314], [7042, 30])


@pytest.mark.real_model
def test_gemma3_speaks_through_transformers_own_model(gemma3_path: Path) -> None:
    from hardpoint.config.engine import ModelConfig
    from hardpoint.frontend.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(model=str(gemma3_path)))
    prompt = tokenizer.encode(
        "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
    )
    _greedy_equals(gemma3_path, "Gemma3ForCausalLM", prompt, tokenizer.encode(" Rome.", add_special_tokens=False))


def _greedy_equals(path: Path, architecture: str, prompt: list[int], wanted: list[int]) -> None:
    import transformers

    file = open_gguf(path)
    config = transformers.AutoConfig.for_model(**config_of(file))
    model = getattr(transformers, architecture)(config)
    weights = GGUFSource(file)
    state = {name: torch.from_numpy(values(weights.load(name))) for name in weights.names()}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in wanted:
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    assert ids[0, len(prompt) :].tolist() == wanted
