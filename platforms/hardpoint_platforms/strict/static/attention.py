"""Paged attention and latent attention of static shape: every request gathers its whole page table and masks the rest.

Scores and softmax are those of the reference (`hardpoint_platforms.reference.attention.attend`).
"""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.reference.attention import PageReader, ScoreRule, attend, gather
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.strict.static.plan import StaticPlan


def build_attention(instance: OpInstance) -> Kernel:
    """attention(q[T, h, d], k[T, hk, d], v[T, hk, dv], state, plan, (sinks[h]?,)) -> (out[T, h, dv], state)."""
    attrs = instance.attrs
    group, pool_layer = attrs["group"], attrs["pool_layer"]
    rule = ScoreRule(attrs["scale"], attrs["window"], attrs["softcap"], attrs["alibi"])

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, plan: StaticPlan, w: Packed = ()
    ) -> tuple[torch.Tensor, State]:
        keys, values = state[pool_layer]
        keys, values = stored(keys, k, plan, group), stored(values, v, plan, group)

        def read(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gather(keys, table), gather(values, table)

        out = paged_attention(q, read, plan, group, rule, w[0] if w else None)
        return out, with_layer(state, pool_layer, (keys, values))

    return attention


def build_mla_attention(instance: OpInstance) -> Kernel:
    """mla_attention(q_nope, q_rope, latent, k_rope, state, plan, (kv_b,)) -> (out[T, h, dv], state)."""
    attrs = instance.attrs
    heads, nope_dim, v_head_dim = attrs["heads"], attrs["nope_dim"], attrs["v_head_dim"]
    group, pool_layer, latent_dim = attrs["group"], attrs["pool_layer"], attrs["latent_dim"]
    rule = ScoreRule(attrs["scale"])

    def mla_attention(
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        state: State,
        plan: StaticPlan,
        w: Packed,
    ) -> tuple[torch.Tensor, State]:
        latents, rope_keys = state[pool_layer]
        latents = stored(latents, latent[:, None], plan, group)
        rope_keys = stored(rope_keys, k_rope[:, None], plan, group)

        def read(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values = gather(latents, table)
            return torch.cat((values, gather(rope_keys, table)), dim=-1), values

        expand = w[0].to(torch.float32).view(heads, nope_dim + v_head_dim, latent_dim)
        absorbed = torch.einsum("thn,hnc->thc", q_nope.to(torch.float32), expand[:, :nope_dim])
        queries = torch.cat((absorbed, q_rope.to(torch.float32)), dim=-1)
        mixed = paged_attention(queries, read, plan, group, rule)
        out = torch.einsum("thc,hvc->thv", mixed, expand[:, nope_dim:])
        return out.to(q_nope.dtype), with_layer(state, pool_layer, (latents, rope_keys))

    return mla_attention


def stored(cache: torch.Tensor, x: torch.Tensor, plan: StaticPlan, group: int) -> torch.Tensor:
    """A new cache[pages, page_tokens, heads, width] that also holds x[T, heads, width]; padding goes to page 0."""
    return cache.index_put((plan.pages[group], plan.offsets[group]), x.to(cache.dtype))


def with_layer(state: State, pool_layer: int, parts: tuple[torch.Tensor, ...]) -> State:
    """The tree with other parts in one pool layer."""
    return (*state[:pool_layer], parts, *state[pool_layer + 1 :])


def paged_attention(
    q: torch.Tensor,
    read: PageReader,
    plan: StaticPlan,
    group: int,
    rule: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over pages that hold the new keys already: q[T, h, d] -> [T, h, dv]."""
    keys, values = read(plan.tables[group])
    key_positions = torch.arange(keys.shape[1], device=q.device)[None]
    rows = attend(plan.to_rows(q), keys, values, plan.positions, key_positions, rule, sinks)
    return plan.to_tokens(rows)
