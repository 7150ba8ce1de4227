"""DeepSeek-V2: latent attention, and experts chosen within groups beside a shared one (arXiv 2405.04434)."""

from __future__ import annotations

from hardpoint.errors import ConfigError
from hardpoint.models import rope
from hardpoint.models.families import reading
from hardpoint.models.fields import Fields
from hardpoint.models.spec import LatentAttentionSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

#: The norms of the latents have this eps whatever `rms_norm_eps` says.
_LATENT_NORM = NormSpec("rms", 1e-6)


def _attention(fields: Fields, length: int) -> LatentAttentionSpec:
    nope, rotated = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    found = rope.parameters(fields)
    if found is None:
        raise ConfigError("config.json: 'rope_parameters' turns the rotation off, which DeepSeek-V2 cannot do without")
    bias = fields.optional_flag("attention_bias")
    scale = (nope + rotated) ** -0.5
    all_dim = found.optional("mscale_all_dim")
    if all_dim and found.kind != "default":
        scale *= rope.yarn_mscale(found.number("factor"), all_dim) ** 2
    return LatentAttentionSpec(
        heads=fields.integer("num_attention_heads"),
        nope_dim=nope,
        rope_dim=rotated,
        v_head_dim=fields.integer("v_head_dim"),
        latent_dim=fields.integer("kv_lora_rank"),
        scale=scale,
        rope=rope.rope_spec(found, rotated, length, interleaved=True),
        latent_norm=_LATENT_NORM,
        q_lora=fields.optional_integer("q_lora_rank"),
        down_bias=bias,
        out_bias=bias,
    )


def _moe(fields: Fields) -> MoESpec:
    method, score = fields.raw("topk_method"), fields.raw("scoring_func") or "softmax"
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"config.json: 'topk_method' is {method!r}; known are greedy, group_limited_greedy")
    if score != "softmax":
        raise ConfigError(f"config.json: 'scoring_func' is {score!r}; DeepSeek-V2 knows softmax")
    grouped = method == "group_limited_greedy"
    width, top_k = fields.integer("moe_intermediate_size"), fields.integer("num_experts_per_tok")
    shared = fields.optional_integer("n_shared_experts", least=0)
    act = reading.activation(fields)
    renormalize = fields.flag("norm_topk_prob") and top_k > 1
    return MoESpec(
        experts=fields.integer("n_routed_experts"),
        top_k=top_k,
        intermediate=width,
        activation=act,
        renormalize=renormalize,
        groups=fields.integer("n_group") if grouped else 1,
        top_groups=fields.integer("topk_group") if grouped else 1,
        scale=1.0 if renormalize else fields.number("routed_scaling_factor"),
        router_fp32=True,
        shared=MLPSpec(width * shared, act, fields.optional_flag("mlp_bias")) if shared else None,
    )


def _deepseek_v2(fields: Fields, length: int) -> ModelSpec:
    layers = fields.integer("num_hidden_layers")
    first, step = fields.integer("first_k_dense_replace", least=0), fields.integer("moe_layer_freq")
    dense = reading.mlp(fields, bias=fields.optional_flag("mlp_bias"))
    sparse = _moe(fields) if first < layers else None

    def ffn(layer: int) -> MLPSpec | MoESpec:
        return dense if sparse is None or layer < first or layer % step else sparse

    return reading.decoder(fields, (_attention(fields, length),) * layers, ffn)


FAMILIES = (
    reading.Family(
        name="DeepSeek-V2",
        model_types=("deepseek_v2",),
        architectures=("DeepseekV2ForCausalLM",),
        defaults={
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "v_head_dim": 128,
            "moe_intermediate_size": 1407,
        },
        spec=_deepseek_v2,
        context=reading.plain_context,
    ),
)
