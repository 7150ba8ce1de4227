"""What tests share that write a tiny llama as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """A checkpoint's name of a weight as GGUF has it."""
    base = name.removesuffix(".weight")
    if base in NAMES:
        return f"{NAMES[base]}.weight"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The metadata that says how large the model is."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
