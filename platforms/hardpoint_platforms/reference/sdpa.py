"""Paged attention on torch's scaled_dot_product_attention, for any device of torch: store what is new, gather, attend.

Steps are planned on the host, so that no graph can hold them.

Soft-capped scores and attention sinks are outside that function; they take a plain masked softmax over the same plan.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.reference.plan import Put
from hardpoint_platforms.reference.sdpa_plan import GroupPlan, KeySource, Need, PrefillRequest, SdpaPlan, SdpaPlanner
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.versioning import Version

#: attend(q [R, h, n, d], k [R, hk, L, d], v [R, hk, L, dv], mask or None, causal) -> [R, h, n, dv]
_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool], torch.Tensor]


class SdpaAttention(OpProvider):
    """Full and sliding-window attention with grouped heads, soft cap and sinks; ALiBi is left to the reference."""

    name = "torch sdpa"
    op = "attention"
    version = Version(1, 0)

    def __init__(self, put: Put | None = None) -> None:
        """`put`: a plan's host tensor on the device; None where the device computes on the host's."""
        self._planner = SdpaPlanner(put)

    def supports(self, instance: OpInstance) -> Support:
        attrs = instance.attrs
        if attrs["alibi"]:
            return Support(False, "no ALiBi")
        if attrs["softcap"] or "sinks" in instance.weights:
            return Support(True, "masked softmax: soft cap or sinks")
        return Support(True, "scaled_dot_product_attention over gathered pages")

    def planner(self) -> AttentionPlanner:
        return self._planner

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs
        softcap, has_sinks = attrs["softcap"] or 0.0, "sinks" in instance.weights
        special = bool(softcap) or has_sinks
        need = Need(attrs["group"], attrs["window"], instance.dtype, masked=special)
        pool_layer, scale, grouped = attrs["pool_layer"], attrs["scale"], attrs["heads"] != attrs["kv_heads"]
        standard = _standard(scale, grouped)

        def kernel(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, plan: SdpaPlan, w: Packed = ()
        ) -> tuple[torch.Tensor, State]:
            step = plan.part(need)
            keys, values = state[pool_layer]
            keys.flatten(0, 1).index_copy_(0, step.slots, k.to(keys.dtype))
            values.flatten(0, 1).index_copy_(0, step.slots, v.to(values.dtype))
            attend = _special(scale, softcap, w[0] if has_sinks else None) if special else standard
            return _attend_step(q, k, v, keys, values, step, attend), state

        return kernel


def _attend_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: GroupPlan,
    attend: _Attend,
) -> torch.Tensor:
    tokens = q.shape[0]
    out: torch.Tensor | None = None
    for rows in step.decode:
        chosen = q[: rows.keys.rows] if rows.tokens is None else q.index_select(0, rows.tokens)
        k_seen, v_seen = _gather(keys, rows.keys, q.dtype), _gather(values, rows.keys, q.dtype)
        result = attend(chosen.unsqueeze(2), k_seen, v_seen, rows.mask, False).squeeze(2)
        if rows.tokens is None and rows.keys.rows == tokens:
            return result
        out = _room(out, q, v)
        if rows.tokens is None:
            out[: rows.keys.rows] = result
        else:
            out.index_copy_(0, rows.tokens, result)
    for request in step.prefill:
        out = _room(out, q, v)
        _prefill(q, k, v, keys, values, request, attend, out[request.first : request.last])
    return _room(out, q, v)


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    request: PrefillRequest,
    attend: _Attend,
    out: torch.Tensor,
) -> None:
    own = slice(request.first, request.last)
    if request.keys is None:
        k_seen, v_seen = _as_stored(k[own], keys), _as_stored(v[own], values)
    else:
        k_seen, v_seen = _gather(keys, request.keys, q.dtype), _gather(values, request.keys, q.dtype)
    queries = q[own]
    for block in request.blocks:
        part = queries[block.first : block.last]
        seen_k, seen_v = k_seen[:, :, block.k0 : block.k1], v_seen[:, :, block.k0 : block.k1]
        if block.mask is None:
            out[block.first : block.last] = attend(_heads_first(part), seen_k, seen_v, None, True)[0].transpose(0, 1)
        else:
            result = attend(_heads_first(part.flip(0)), seen_k, seen_v, block.mask, False)
            out[block.first : block.last] = result[0].transpose(0, 1).flip(0)


def _standard(scale: float, grouped: bool) -> _Attend:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)

    return attend


def _special(scale: float, softcap: float, sinks: torch.Tensor | None) -> _Attend:
    """Masked softmax in fp32. Sinks [h] are one more score per head that takes weight and gives nothing."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        rows, heads, queries, _ = q.shape
        kv_heads = k.shape[1]
        grouped = q.reshape(rows, kv_heads, -1, q.shape[-1])
        scores = (grouped @ k.transpose(-1, -2)).float().mul_(scale).view(rows, heads, queries, -1)
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += mask
        if sinks is not None:
            sink = sinks.float().view(1, heads, 1, 1).expand(rows, heads, queries, 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        mixed = weights.to(v.dtype).reshape(rows, kv_heads, -1, weights.shape[-1]) @ v
        return mixed.view(rows, heads, queries, -1)

    return attend


def _gather(pool: torch.Tensor, source: KeySource, dtype: torch.dtype) -> torch.Tensor:
    """[rows, heads, length, width] out of a pool [pages, page_tokens, heads, width]."""
    tokens = pool.flatten(0, 1)
    if source.slots is None:
        found = tokens[source.start : source.start + source.length].unsqueeze(0)
    else:
        found = tokens.index_select(0, source.slots).unflatten(0, (source.rows, source.length))
    return found.transpose(1, 2).to(dtype)


def _as_stored(x: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """[1, heads, n, width] of the step's own keys, rounded as the pool rounds them."""
    return _heads_first(x.to(pool.dtype).to(x.dtype))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _room(out: torch.Tensor | None, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output [T, h, dv], zeroed: padded rows are not attended."""
    return q.new_zeros(q.shape[0], q.shape[1], v.shape[-1]) if out is None else out
