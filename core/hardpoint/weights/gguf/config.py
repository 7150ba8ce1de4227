"""GGUF metadata -> a config dict in the spelling of config.json.

Keys of the file stand under the architecture's name ("llama.block_count"); the comments name those whose meaning is not
plain. What GGUF does not store (activation, Gemma's query scale) comes from the published models of the family.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hardpoint.errors import UnsupportedArchitecture, WeightsError
from hardpoint.weights.gguf.names import MIXTRAL, NAME_TABLES, NameTable
from hardpoint.weights.gguf.split import GGUF

Config = dict[str, Any]
#: Beyond any model; layers are counted out in lists.
_MAX_SIZE, _MAX_LAYERS = 1 << 31, 1 << 16
_LARGEST = float(np.finfo(np.float32).max)
#: Frequency bands of Llama 3.1 and later, tried against the file's `rope_freqs`.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Metadata:
    """Typed access to one file's metadata. Raises WeightsError naming file and key."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf = gguf
        self.architecture = self._architecture()

    def _architecture(self) -> str:
        name = self.gguf.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise WeightsError(f"{self.gguf.path}: metadata 'general.architecture' is missing")
        if name not in NAME_TABLES:
            raise UnsupportedArchitecture(
                f"{self.gguf.path}: no native model for GGUF architecture {name!r}; "
                f"supported: {', '.join(NAME_TABLES)} (a fallback for others is planned)"
            )
        return name

    @property
    def table(self) -> NameTable:
        """Names of this file's architecture."""
        mixtral = self.architecture == "llama" and self.integer("expert_count", 0)
        return MIXTRAL if mixtral else NAME_TABLES[self.architecture]

    def get(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's name."""
        return self.gguf.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number. A value per layer counts where all layers agree."""
        value = self.get(key, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if value is None or isinstance(value, bool) or not isinstance(value, int):
            what = "missing" if value is None else f"{value!r}, not one whole number"
            raise WeightsError(f"{self.gguf.path}: metadata '{self.architecture}.{key}' is {what}")
        return value

    def size(self, key: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        """A whole number from 1 to `most`."""
        value = self.integer(key, default)
        if not 1 <= value <= most:
            raise WeightsError(
                f"{self.gguf.path}: metadata '{self.architecture}.{key}' is {value}; 1 to {most} are possible"
            )
        return value

    def optional(self, key: str) -> int | None:
        """A whole number, or None where it is absent."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise WeightsError(f"{self.gguf.path}: metadata '{self.architecture}.{key}' is {value!r}, not a number")
        # Stored as fp32: 1e-5 would come out as 9.9999997e-06, which is another fp64 number than the model's.
        return float(np.format_float_positional(np.float32(value), unique=True))

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise WeightsError(f"{self.gguf.path}: metadata '{self.architecture}.{key}' is {value!r}, not a string")
        return value

    def flag(self, key: str) -> bool:
        """Whether a flag is there and set."""
        value = self.get(key, False)
        return isinstance(value, int) and bool(value)

    def token(self, name: str) -> int | None:
        """A special token's id."""
        value = self.gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None


def config_of(gguf: GGUF) -> Config:
    """The config of a file; null where a key of the family has no value here, so that no default steps in.

    Raises UnsupportedArchitecture, or WeightsError naming the key at fault.
    """
    meta = Metadata(gguf)
    model_type = meta.table.model_type
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{gguf.path}: has no tensor 'token_embd.weight'")
    heads, hidden = meta.size("attention.head_count"), meta.size("embedding_length")
    config: Config = {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": meta.size("block_count", most=_MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.size("attention.head_count_kv", heads),
        "head_dim": meta.size("attention.key_length", hidden // heads),
        "intermediate_size": meta.integer("feed_forward_length"),
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": _dtype(gguf),
        "bos_token_id": meta.token("bos"),
        "eos_token_id": eos_token_ids(gguf),
        "pad_token_id": meta.token("padding"),
    }
    scaling = _rope_scaling(meta, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    _FAMILIES.get(model_type, _llama)(meta, config)
    return config


def eos_token_ids(gguf: GGUF) -> list[int] | None:
    """Every token that the metadata names as an end: of sequence, of turn, of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (gguf.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(token for token in found if isinstance(token, int))) or None


def generation_config_of(gguf: GGUF) -> dict[str, Any]:
    """What generation_config.json would say: end tokens and, where the file has them, sampling defaults."""
    config: dict[str, Any] = {}
    ends = eos_token_ids(gguf)
    if ends:
        config["eos_token_id"] = ends
    for key, name in (("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p")):
        value = gguf.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            config[name] = value
    return config


def _dtype(gguf: GGUF) -> str:
    """The dtype to compute in where nothing else is asked: the matrices' own where they are plain 16-bit."""
    bytes_of: dict[str, int] = {}
    for info in gguf.tensors.values():
        if len(info.shape) > 1:
            bytes_of[info.type.name] = bytes_of.get(info.type.name, 0) + info.nbytes
    most = max(bytes_of, key=lambda name: bytes_of[name], default="F32")
    return {"F16": "float16", "BF16": "bfloat16"}.get(most, "float32")


def _rope_scaling(meta: Metadata, config: Config) -> Config | None:
    kind = meta.text("rope.scaling.type", "none")
    context = config["max_position_embeddings"]
    # Files older than `rope.scaling` have `rope.scale_linear` alone.
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0)) or 1.0
    if "rope_freqs.weight" in meta.gguf.tensors:
        return _from_factors(meta, config)
    if kind == "longrope" or "rope_factors_long.weight" in meta.gguf.tensors:
        return _longrope(meta)
    if kind == "none" and factor == 1.0:
        return None
    original = meta.optional("rope.scaling.original_context_length")
    if kind in ("none", "linear"):
        # `context_length` already counts the factor in.
        original = original or int(context / factor)
        return {"rope_type": "linear", "factor": factor, "original_max_position_embeddings": original}
    if kind == "yarn":
        original = original or context
        scaling: Config = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        log_multiplier = meta.number("rope.scaling.yarn_log_multiplier", 0.0)
        if log_multiplier:
            # DeepSeek: 0.1 * mscale_all_dim. Its checkpoints have mscale equal to it.
            all_dim = round(log_multiplier * 10, 6)
            scaling |= {"mscale": all_dim, "mscale_all_dim": all_dim}
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if meta.get(f"rope.scaling.{key}") is not None:
                scaling[name] = meta.number(f"rope.scaling.{key}")
        return scaling
    raise WeightsError(f"{meta.gguf.path}: metadata '{meta.architecture}.rope.scaling.type' is {kind!r}, unknown here")


def _floats(meta: Metadata, name: str) -> list[float]:
    info = meta.gguf.tensors[name]
    if info.type.name != "F32":
        raise WeightsError(f"{meta.gguf.describe(name)}: rope factors must be F32")
    return [float(value) for value in meta.gguf.data(name).view("<f4")]


def _from_factors(meta: Metadata, config: Config) -> Config:
    """`rope_freqs` holds a divisor per frequency: Llama 3's bands, or any other as LongRoPE lists with equal ends."""
    factors = _floats(meta, "rope_freqs.weight")
    pairs = np.arange(len(factors))
    wavelength = 2 * np.pi * config["rope_theta"] ** (pairs / len(factors))
    low, high, original = _LLAMA3.values()
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    largest = max(factors)
    bands = 1 / ((1 - smooth) / largest + smooth)
    if np.allclose(bands, factors, rtol=1e-4):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    context = config["max_position_embeddings"]
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _longrope(meta: Metadata) -> Config:
    scaling: Config = {
        "rope_type": "longrope",
        "short_factor": _floats(meta, "rope_factors_short.weight"),
        "long_factor": _floats(meta, "rope_factors_long.weight"),
        "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length"),
    }
    if meta.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = meta.number("rope.scaling.attn_factor")
    return scaling


def _llama(meta: Metadata, config: Config) -> None:
    config["attention_bias"] = _bias(meta, "attn_q", "attn_output")
    config["mlp_bias"] = _bias(meta, "ffn_up", "ffn_down")
    if meta.get("rope.dimension_count") is not None and meta.get("attention.key_length") is None:
        config["head_dim"] = meta.size("rope.dimension_count")


def _bias(meta: Metadata, *modules: str) -> bool | None:
    """Whether all the modules have a bias, or none; null, which lets the model look itself, where they differ."""
    found = {f"blk.0.{module}.bias" in meta.gguf.tensors for module in modules}
    return found.pop() if len(found) == 1 else None


def _mixtral(meta: Metadata, config: Config) -> None:
    _llama(meta, config)
    config["num_local_experts"] = meta.integer("expert_count")
    config["num_experts_per_tok"] = meta.integer("expert_used_count")


def _qwen_moe(meta: Metadata, config: Config) -> None:
    config |= {
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        # Not stored: true in every published Qwen3-MoE, false in Qwen2-MoE.
        "norm_topk_prob": config["model_type"] == "qwen3_moe",
    }
    if meta.get("expert_shared_feed_forward_length") is not None:
        config["shared_expert_intermediate_size"] = meta.integer("expert_shared_feed_forward_length")


def _gemma(meta: Metadata, config: Config) -> None:
    config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"


def _query_scale(config: Config, largest: int) -> int:
    """`query_pre_attn_scalar` is not stored: the head's width, but in the largest model of each family H / heads."""
    wide = config["num_hidden_layers"] == largest
    return int(config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"])


def _gemma2(meta: Metadata, config: Config) -> None:
    _gemma(meta, config)
    layers = config["num_hidden_layers"]
    config |= {
        "query_pre_attn_scalar": _query_scale(config, 46),
        "sliding_window": meta.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
    }


def _optional_number(meta: Metadata, key: str) -> float | None:
    return None if meta.get(key) is None else meta.number(key)


def _gemma3(meta: Metadata, config: Config) -> None:
    _gemma(meta, config)
    layers = config["num_hidden_layers"]
    pattern = meta.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, array):
        sliding = [bool(flag) for flag in pattern]
    else:
        every = meta.size("attention.sliding_window_pattern", 6)
        sliding = [bool((i + 1) % every) for i in range(layers)]
    full = {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": config.pop("rope_theta")}
    local = meta.number("rope.freq_base_swa", 10000.0)
    config |= {
        "query_pre_attn_scalar": _query_scale(config, 62),
        "sliding_window": meta.integer("attention.sliding_window"),
        "attn_logit_softcapping": _optional_number(meta, "attn_logit_softcapping"),
        "final_logit_softcapping": _optional_number(meta, "final_logit_softcapping"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in sliding],
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(meta: Metadata, config: Config) -> None:
    rotary, head = meta.integer("rope.dimension_count"), config["head_dim"]
    config |= {
        "partial_rotary_factor": rotary / head,
        "sliding_window": meta.optional("attention.sliding_window") or None,
        "original_max_position_embeddings": meta.optional("rope.scaling.original_context_length"),
    }


def _deepseek(meta: Metadata, config: Config) -> None:
    latent, rotary = meta.integer("attention.kv_lora_rank"), meta.integer("rope.dimension_count")
    # Files with split kv_b describe attention over the latent; the heads' own sizes are then under *_mla.
    key = meta.integer("attention.key_length_mla", meta.integer("attention.key_length"))
    sigmoid = meta.integer("expert_gating_func", 1) == 2
    groups = meta.integer("expert_group_count", 1)
    config.pop("head_dim")
    config |= {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": meta.optional("attention.q_lora_rank"),
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": meta.integer("attention.value_length_mla", meta.integer("attention.value_length")),
        "n_routed_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm"),
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": meta.integer("expert_group_used_count", 1),
    }


_FAMILIES: Mapping[str, Callable[[Metadata, Config], None]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2": lambda meta, config: None,
    "qwen3": lambda meta, config: None,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "deepseek_v2": _deepseek,
}
