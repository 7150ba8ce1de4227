"""Our decoder gives transformers' logits, however the tokens reach it: chunks, decodes, mixed batches, prefix hits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.reference

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
LOCAL = {"rope_type": "default", "rope_theta": 500.0}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    ("llama", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "head_dim": 8}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False, "layer_types": None}),
    ("qwen2", {"layer_types": None, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"rope_parameters": YARN, "attention_bias": True}),
    ("qwen3", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16, "attention_factor": 1.2}}),
    ("gemma2", {}),
    ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "sliding_window": 3}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {}),
    ("gemma3_text", {"num_hidden_layers": 7, "layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 2}),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": LOCAL,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    ("phi3", {}),
    ("phi3", {"sliding_window": 8}),
    ("phi3", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.75}}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    ("qwen3_moe", {"num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 8}),
    ("deepseek_v2", {}),
    ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True}),
    ("deepseek_v2", {"first_k_dense_replace": 3, "v_head_dim": 20}),
    ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.8}}),
]


def _name(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *variant[1]])


def _assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    bound = 1e-4 * max(1.0, wanted.abs().max().item())
    assert (got - wanted).abs().max().item() < bound
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))


def _drive(served: Any, prompts: list[torch.Tensor]) -> list[Any]:
    """Interleaved prefill, chunks, decodes, padding, and a sequence that starts from another's pages."""
    a, b, c = (served.sequence(tokens) for tokens in prompts)
    served.step([(a, 11)])
    served.step([(a, 1), (b, 7)], pad_tokens=3, pad_requests=2)
    served.step([(b, 1), (c, 10), (a, 1)])
    # a prefix hit: c's first two pages, then other tokens
    d = served.sequence(torch.cat((prompts[2][:8], prompts[0][:9])), c, 8)
    served.step([(a, 1), (d, 4), (c, 9), (b, 1)], pad_tokens=1)
    served.step([(a, 2), (c, 1)], pad_requests=1)
    running = [d, a, c, b]
    while running := [sequence for sequence in running if sequence.computed < len(sequence.tokens)]:
        served.step([(sequence, 1) for sequence in running], pad_tokens=len(running) % 2)
    return [a, b, c, d]


@pytest.mark.parametrize("variant", VARIANTS, ids=[_name(variant) for variant in VARIANTS])
def test_logits_equal_transformers(
    variant: tuple[str, dict[str, Any]], make_model: Any, serve: Any, reference_logits: Any, prompts: Any
) -> None:
    model, folder = make_model(variant[0], **variant[1])
    served = serve(folder)
    assert served.book.unused() == []
    for sequence in _drive(served, prompts):
        wanted = reference_logits(model, sequence.tokens)
        got = torch.cat(sequence.logits)
        _assert_close(got, wanted[len(wanted) - len(got) :])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v2"])
def test_the_oracle_notices_the_first_token(family: str, make_model: Any, reference_logits: Any, prompts: Any) -> None:
    """Otherwise equal logits would prove nothing about attention."""
    model, _ = make_model(family)
    changed = prompts[0].clone()
    changed[0] = (changed[0] + 7) % 100 + 3
    difference = reference_logits(model, changed)[3] - reference_logits(model, prompts[0])[3]
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize(("length", "max_model_len"), [(16, 16), (48, 48)])
def test_longrope_takes_the_list_of_the_longest_sequence(
    length: int, max_model_len: int, make_model: Any, serve: Any, reference_logits: Any
) -> None:
    model, folder = make_model("phi3", rope_parameters=LONG, original_max_position_embeddings=16)
    served = serve(folder, max_model_len)
    tokens = torch.arange(length) % 100 + 3
    sequence = served.sequence(tokens)
    served.step([(sequence, length - 5)])
    served.step([(sequence, 5)])
    wanted = reference_logits(model, tokens)
    _assert_close(torch.cat(sequence.logits), wanted)


@pytest.mark.parametrize("length", [16, 40, 64])
def test_dynamic_rope_is_fixed_by_the_longest_sequence(
    length: int, make_model: Any, serve: Any, reference_logits: Any
) -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model, folder = make_model("llama", rope_parameters=scaling, max_position_embeddings=16)
    served = serve(folder, length)
    sequence = served.sequence(torch.arange(length) % 100 + 3)
    served.step([(sequence, length)])
    _assert_close(sequence.logits[0], reference_logits(model, sequence.tokens))


def test_conditional_gemma3_serves_its_text_part(
    make_model: Any, serve: Any, reference_logits: Any, prompts: Any
) -> None:
    """An image checkpoint holds the text model one level deeper, beside a tower that is left alone."""
    from safetensors.torch import load_file, save_file

    model, folder = make_model("gemma3_text")
    path = folder / "model.safetensors"
    deeper = {
        f"language_{name}".replace("language_model.", "language_model.model."): t for name, t in load_file(path).items()
    }
    deeper["vision_tower.patch"] = torch.zeros(2, 2)
    save_file(deeper, path)
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": model.config.to_dict(),
        "vision_config": {"hidden_size": 32},
    }
    served = serve(folder, config=config)
    sequence = served.sequence(prompts[0])
    served.step([(sequence, len(prompts[0]))])
    _assert_close(sequence.logits[0], reference_logits(model, prompts[0]))
    assert served.book.unused() == ["vision_tower.patch"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v2"])
def test_bf16_stays_near_the_oracle(
    family: str, make_model: Any, serve: Any, reference_logits: Any, prompts: Any
) -> None:
    """Rounding differs op by op and may tip a router, so the median token is compared, each with fp32."""
    model, folder = make_model(family, dtype=torch.bfloat16)
    served = serve(folder, dtype=torch.bfloat16)
    sequence = served.sequence(prompts[0])
    served.step([(sequence, len(prompts[0]))])
    got, rounded = sequence.logits[0], reference_logits(model, prompts[0])
    exact = reference_logits(model.float(), prompts[0])
    assert got.dtype == torch.float32
    ours, theirs = ((logits - exact).pow(2).mean(-1).median() for logits in (got, rounded))
    assert 0 < ours < 1.5 * theirs
