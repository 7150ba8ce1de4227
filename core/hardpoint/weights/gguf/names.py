"""GGUF tensor names -> the names of Hugging Face checkpoints, per architecture, and what the converter did to each.

The right-hand names are those of the transformers model classes, the left-hand ones those of GGUF's standard
("blk.N." stands in front of a layer's). `Fix` says what must be undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Fix(Enum):
    """What turns a GGUF tensor into the checkpoint's."""

    NONE = "none"
    UNPERMUTE_Q = "unpermute_q"  # rows of each head were interleaved for rope on neighbouring pairs
    UNPERMUTE_K = "unpermute_k"
    MINUS_ONE = "minus_one"  # the converter added one to norms that the model applies as (1 + weight)
    ROW = "row"  # [H] in GGUF, [1, H] in the checkpoint


@dataclass(frozen=True)
class NameTable:
    """One architecture.

    Attributes:
        model_type: as in config.json.
        layer: tensor name within a layer (without ".weight" or ".bias") -> checkpoint module within the layer.
        experts: stacked expert tensor -> module of one expert, with {expert} for its number.
        fixes: by GGUF name within a layer.
        minus_one: whether every norm was stored with one added.
    """

    model_type: str
    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    fixes: Mapping[str, Fix] = field(default_factory=dict)
    minus_one: bool = False


#: Outside the layers, the same everywhere.
GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
#: Read by the config, not by the model.
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_SANDWICH = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_PERMUTED = {"attn_q": Fix.UNPERMUTE_Q, "attn_k": Fix.UNPERMUTE_K}


def _shared(module: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"mlp.{module}.{part}_proj" for part in ("gate", "up", "down")}


NAME_TABLES: Mapping[str, NameTable] = {
    "llama": NameTable("llama", _LLAMA, fixes=_PERMUTED),
    "qwen2": NameTable("qwen2", _LLAMA),
    "qwen3": NameTable("qwen3", {**_LLAMA, **_QK_NORM}),
    "qwen2moe": NameTable(
        "qwen2_moe",
        {**_LLAMA, **_ROUTER, **_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        _EXPERTS,
        fixes={"ffn_gate_inp_shexp": Fix.ROW},
    ),
    "qwen3moe": NameTable("qwen3_moe", {**_LLAMA, **_QK_NORM, **_ROUTER}, _EXPERTS),
    "gemma": NameTable("gemma", _LLAMA, minus_one=True),
    "gemma2": NameTable("gemma2", _SANDWICH, minus_one=True),
    "gemma3": NameTable("gemma3_text", {**_SANDWICH, **_QK_NORM}, minus_one=True),
    "phi3": NameTable(
        "phi3",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "deepseek2": NameTable(
        "deepseek_v2",
        {
            **_LLAMA,
            **_ROUTER,
            **_shared("shared_experts"),
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        },
        _EXPERTS,
    ),
}

#: Mixtral is "llama" with experts; its modules have names of their own.
MIXTRAL = NameTable(
    "mixtral",
    {**_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"},
    {
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    },
    fixes=_PERMUTED,
)


def fix_of(table: NameTable, name: str) -> Fix:
    """What must be undone for a GGUF tensor. `name` is within the layer, or global, without its suffix."""
    if table.minus_one and name.endswith("norm"):
        return Fix.MINUS_ONE
    return table.fixes.get(name, Fix.NONE)
