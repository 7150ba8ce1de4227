"""Multi-head latent attention (DeepSeek-V2): the cache holds one latent and one rope key per token for all heads.

The up-projection of keys is applied to the queries and that of values to the result, which is the same sum in another
order, so that a step never expands the cached latents:

    q_nope . (W_k latent) = (W_k^T q_nope) . latent        out = W_v (softmax(scores) latent)
"""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.reference.attention import ScoreRule, gather, paged_attention, store
from hardpoint_platforms.reference.plan import ReferencePlan
from hardpoint_platforms.state_cache import State


def build_mla_attention(instance: OpInstance) -> Kernel:
    """mla_attention(q_nope, q_rope, latent, k_rope, state, plan, (kv_b,)) -> (out[T, h, dv], state)."""
    attrs = instance.attrs
    heads, nope_dim, v_head_dim = attrs["heads"], attrs["nope_dim"], attrs["v_head_dim"]
    group, pool_layer = attrs["group"], attrs["pool_layer"]
    latent_dim = attrs["latent_dim"]
    rule = ScoreRule(attrs["scale"])

    def mla_attention(
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        state: State,
        plan: ReferencePlan,
        w: Packed,
    ) -> tuple[torch.Tensor, State]:
        latents, rope_keys = state[pool_layer]
        store(latents, latent[:, None], plan, group)
        store(rope_keys, k_rope[:, None], plan, group)

        def read(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values = gather(latents, table)
            return torch.cat((values, gather(rope_keys, table)), dim=-1), values

        expand = w[0].to(torch.float32).view(heads, nope_dim + v_head_dim, latent_dim)
        absorbed = torch.einsum("thn,hnc->thc", q_nope.to(torch.float32), expand[:, :nope_dim])
        queries = torch.cat((absorbed, q_rope.to(torch.float32)), dim=-1)
        mixed = paged_attention(queries, read, plan, group, rule, latent_dim)
        out = torch.einsum("thc,hvc->thv", mixed, expand[:, nope_dim:])
        return out.to(q_nope.dtype), state

    return mla_attention
