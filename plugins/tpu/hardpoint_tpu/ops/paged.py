"""`attention` as XLA makes it: new rows are scattered into the pools, each request gathers its pages, masks the rest.

Pools stay in the form that they are kept in: a pool that is only seen through another shape would be copied in each
step before it is written to.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import Support
from hardpoint_tpu.kernels_table import TpuProvider
from hardpoint_tpu.plan import RaggedPlan
from hardpoint_tpu.runtime import array_of
from hardpoint_tpu.state import Pools


class GatheredAttention(TpuProvider):
    """Prompts of one request, decodes, and the kit's mixtures."""

    name = "xla"

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "pages gathered and masked, compiled by XLA")

    def build(self, instance: OpInstance) -> Kernel:
        return self.kernels.bind(self, instance, self._attention, dense=False)

    def _attention(self, instance: OpInstance) -> Kernel:
        attrs, wrap, group = instance.attrs, self.runtime.wrap, instance.attrs["group"]

        def attention(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pools: Pools, plan: RaggedPlan, w: Packed = ()
        ) -> tuple[torch.Tensor, Pools]:
            where = (array_of(plan.pages[group]), array_of(plan.offsets[group]))
            held = [_stored(array_of(p), array_of(x), where) for p, x in zip(pools.layers[0], (k, v), strict=True)]
            table = array_of(plan.tables[group])
            keys, values = (_pages(pool, table, attrs["kv_heads"]) for pool in held)
            sinks = array_of(w[0]) if w else None
            rows = jnp.where(array_of(plan.valid)[..., None, None], array_of(q)[array_of(plan.rows)], 0)
            out = _attend(rows, keys, values, array_of(plan.positions), sinks, attrs)
            flat = out.reshape(-1, *out.shape[2:])[array_of(plan.places)]
            return wrap(flat.astype(array_of(q).dtype)), Pools((tuple(map(wrap, held)),), pools.shapes)

        return attention


def _stored(pool: Any, x: Any, where: tuple[Any, Any]) -> Any:
    """pool [pages, page_tokens, heads * width] with rows x [T, heads, width]."""
    return pool.at[where].set(x.reshape(x.shape[0], -1).astype(pool.dtype))


def _pages(pool: Any, table: Any, heads: int) -> Any:
    """float32 [R, P * page_tokens, heads, width] of the pages in `table` [R, P]."""
    found = pool[table].astype(jnp.float32)
    return found.reshape(table.shape[0], -1, heads, pool.shape[-1] // heads)


def _attend(q: Any, keys: Any, values: Any, positions: Any, sinks: Any, attrs: Any) -> Any:
    """float32 [R, n, h, dv] of q [R, n, h, d] at positions [R, n]; keys and values [R, L, hk, d] and [R, L, hk, dv]."""
    exact, kv_heads = jax.lax.Precision.HIGHEST, attrs["kv_heads"]
    grouped = q.astype(jnp.float32).reshape(*q.shape[:2], kv_heads, -1, q.shape[-1])
    scores = jnp.einsum("rnkgd,rlkd->rkgnl", grouped, keys, precision=exact) * attrs["scale"]
    if attrs["softcap"] is not None:
        scores = attrs["softcap"] * jnp.tanh(scores / attrs["softcap"])
    distance = positions[:, :, None] - jnp.arange(keys.shape[1], dtype=positions.dtype)
    seen = distance >= 0
    if attrs["window"] is not None:
        seen = seen & (distance < attrs["window"])
    if attrs["alibi"] is not None:
        slopes = jnp.asarray(attrs["alibi"], jnp.float32).reshape(kv_heads, -1, 1, 1)
        scores = scores - slopes * distance[:, None, None]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    extra: Any = 0.0
    if sinks is not None:
        logit = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        top = jnp.maximum(top, logit)
        extra = jnp.exp(logit - top)
    weights = jnp.exp(scores - top)
    weights = weights / (weights.sum(-1, keepdims=True) + extra)
    # what no query sees may hold anything, and 0 * nan is nan
    values = jnp.where(seen.any(1)[..., None, None], values, 0.0)
    out = jnp.einsum("rkgnl,rlkd->rnkgd", weights, values, precision=exact)
    return out.reshape(*q.shape[:3], -1)
