"""Dummy weights have whatever shape the model asks for, and are the same in every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.errors import WeightsError
from hardpoint.weights.dummy import DummySource

pytestmark = pytest.mark.reference

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", "num_attention_heads": 4, **TINY},
    {"model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, **TINY},
    {"model_type": "phi3", "num_attention_heads": 4, **TINY},
    {
        "model_type": "qwen3_moe",
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **TINY,
    },
    {
        "model_type": "deepseek_v2",
        "num_attention_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **TINY,
    },
]


@pytest.mark.parametrize("config", CONFIGS, ids=[config["model_type"] for config in CONFIGS])
def test_every_kind_of_layer_runs_on_dummy_weights(config: dict[str, Any], serve: Any) -> None:
    def logits(seed: int) -> torch.Tensor:
        served = serve(Path(), config=config, source=DummySource(seed))
        assert served.book.unused() == []
        sequence = served.sequence(torch.arange(9) + 3)
        served.step([(sequence, 9)])
        return sequence.logits[0]

    first = logits(1)
    assert first.shape == (9, 97)
    assert torch.equal(first, logits(1))
    assert not torch.equal(first, logits(2))
    assert first.std() > 0.01


def test_a_name_has_one_shape() -> None:
    source = DummySource(dtype=torch.bfloat16)
    assert source.require("a.weight", (3, 4)).dtype == torch.bfloat16
    assert source.load("a.weight").shape == (3, 4)
    with pytest.raises(WeightsError, match=r"a\.weight"):
        source.require("a.weight", (4, 3))
    with pytest.raises(WeightsError, match=r"b\.weight"):
        source.load("b.weight")
