"""What a decoder is made of, as data. A family turns a config into a `ModelSpec`; `decoder.build` turns that into ops.

Every size here is a number of elements, every window and context a number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class NormSpec:
    """Attributes:
    kind: rms, rms1p (times 1 + weight), ln or l2; as the `norm` contract has them.
    eps: added to the variance.
    """

    kind: str = "rms"
    eps: float = 1e-6


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding with fixed frequencies.

    Attributes:
        inv_freq: one angular frequency per rotated pair; twice as many dims are rotated.
        mscale: multiplies cos and sin.
        interleaved: pairs are (0, 1), (2, 3) ... instead of first half with second half.
    """

    inv_freq: tuple[float, ...]
    mscale: float = 1.0
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that are rotated, the first ones."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    Attributes:
        window: tokens a query looks back, itself included; None for all.
        softcap: scores become softcap * tanh(scores / softcap).
        qk_norm: norm over each head of q and k, before the rotation.
        qkv_bias, out_bias: True or False where the config says so; None takes a bias where the checkpoint has one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    window: int | None = None
    softcap: float | None = None
    qk_norm: NormSpec | None = None
    qkv_bias: bool | None = False
    out_bias: bool | None = False


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values come from one latent per token.

    Attributes:
        nope_dim, rope_dim: dims of a query head without and with rotation.
        latent_dim: width of the cached latent.
        q_lora: rank of the query projection, or None for a plain one.
        latent_norm: norm of the latent and of the compressed query.
        down_bias, out_bias: biases of the down projections and of the output projection.
    """

    heads: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    latent_dim: int
    scale: float
    rope: RopeSpec
    latent_norm: NormSpec
    q_lora: int | None = None
    down_bias: bool | None = False
    out_bias: bool | None = False
    window: int | None = None


@dataclass(frozen=True)
class MLPSpec:
    """A gated feed-forward block: down(act(gate(x)) * up(x)). `bias` as in `AttentionSpec`."""

    intermediate: int
    activation: str = "silu"
    bias: bool | None = False


@dataclass(frozen=True)
class MoESpec:
    """A router and its experts.

    Attributes:
        intermediate: width of one expert.
        renormalize: weights of the chosen experts are made to sum to one.
        groups, top_groups: experts lie in groups; only the best top_groups are looked into. 1 and 1 for none.
        group_score: how a group is scored: max or top2.
        scale: multiplies the weights.
        router_fp32: the router computes in fp32 from fp32 weights whatever the model's dtype.
        shared: an MLP that every token takes, added to the experts' output.
    """

    experts: int
    top_k: int
    intermediate: int
    activation: str = "silu"
    score: str = "softmax"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scale: float = 1.0
    router_fp32: bool = False
    shared: MLPSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: x += post(attention(pre(x))), x += post(ffn(pre(x))); the post norms only where named."""

    attention: AttentionSpec | LatentAttentionSpec
    ffn: MLPSpec | MoESpec


@dataclass(frozen=True)
class Names:
    """Checkpoint names, relative to their parent.

    Attributes:
        prefixes: of everything but the head, in the order tried; the first under which the embedding lies is taken.
        heads: of the output projection, in the order tried.
        qkv, gate_up: the name of a projection that the checkpoint holds fused, or None.
        post_attention, post_ffn: norms of a block's output, or None.
    """

    prefixes: tuple[str, ...] = ("model.", "")
    heads: tuple[str, ...] = ("lm_head",)
    embed: str = "embed_tokens"
    final_norm: str = "norm"
    layers: str = "layers"
    attention: str = "self_attn"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    qkv: str | None = None
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    ffn: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None
    router: str = "gate"
    experts: str = "experts"
    shared: str = "shared_experts"
    pre_attention: str = "input_layernorm"
    post_attention: str | None = None
    pre_ffn: str = "post_attention_layernorm"
    post_ffn: str | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder.

    Attributes:
        vocab_size: rows of the embedding and of the logits.
        norm: of every layer and of the end.
        tied: the output projection is the embedding.
        embed_scale: multiplies the embedding.
        logit_softcap: logits become softcap * tanh(logits / softcap).
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied: bool = False
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    names: Names = field(default_factory=Names)
