"""Attention over blocked pages: prefill, decode and mixtures in one kernel; latent attention on top of it.

The kernel goes from request to request on the chip and reads only the pages that the request's queries can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from acme_npu.memory import CHIP
from acme_npu.ops.plan import AcmePlan, AcmePlanner
from acme_npu.ops.provider import AcmeProvider
from acme_npu.pages import LANES, keys_of, write_rows
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import AttentionPlanner
from hardpoint_platforms.state_cache import State


@dataclass(frozen=True)
class Rule:
    """How a score becomes a weight. `ahead`: keys behind itself that a query sees, 0 unless something is wrong."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None
    ahead: int = 0
    softmax: torch.dtype = torch.float32


@dataclass(frozen=True)
class Run:
    """Tokens [start, stop) of the batch, at positions [first, length); pages from number `skipped` on."""

    start: int
    stop: int
    first: int
    pages: torch.Tensor
    skipped: int


def requests(plan: AcmePlan, group: int, window: int | None) -> Iterator[Run]:
    """The real requests of a plan (of plain tensors: inside a kernel)."""
    size = plan.page_tokens
    starts, lengths = plan.starts.tolist(), plan.lengths.tolist()
    for row, length in enumerate(lengths):
        start, stop = starts[row], starts[row + 1]
        if stop > start:
            first = length - (stop - start)
            skipped = 0 if window is None else max(0, first - window + 1) // size
            pages = plan.tables[group][row, skipped : -(-length // size)]
            yield Run(start, stop, first, pages, skipped)


def store(blocks: torch.Tensor, rows: torch.Tensor, plan: AcmePlan, group: int) -> None:
    """Write rows [T, heads, width] at the plan's slots. Page sizes are powers of two: shift and mask."""
    shift = plan.page_tokens.bit_length() - 1
    slots = plan.slots[group]
    write_rows(blocks, slots >> shift, slots & ((1 << shift) - 1), rows)


def weighted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run, base: int, rule: Rule, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q [n, h, d] over k [hk, L, d] and v [hk, L, dv], keys from position `base` on: float32 [n, h, dv]."""
    count, heads, _ = q.shape
    kv_heads, known = k.shape[:2]
    queries = q.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [hk, G, n, d]
    scores = queries @ k.float()[:, None].transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = (run.first + torch.arange(count))[:, None] - (base + torch.arange(known))
    seen = distance >= -rule.ahead
    if rule.window is not None:
        seen &= distance < rule.window
    if rule.alibi is not None:
        scores = scores - torch.tensor(rule.alibi).view(kv_heads, -1, 1, 1) * distance
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, extra), dim=-1)
    weights = scores.to(rule.softmax).softmax(-1).float()[..., :known]
    values = v.float().masked_fill(~seen.any(0)[:, None], 0.0)  # what nobody sees may hold anything
    out: torch.Tensor = (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(count, heads, -1)
    return out


class Attention(AcmeProvider):
    """Heads of whole lanes; a softcap and sinks together are not wired."""

    op = "attention"

    def __init__(self, planner: AcmePlanner, fault: str = "") -> None:
        super().__init__(fault)
        self._planner = planner

    def planner(self) -> AttentionPlanner:
        return self._planner

    def refuses(self, instance: OpInstance) -> str:
        attrs = instance.attrs
        for name in ("head_dim", "v_head_dim"):
            if attrs[name] % LANES:
                return f"{name} {attrs[name]} is not a multiple of {LANES}"
        if attrs["sinks"] and attrs["softcap"] is not None:
            return "sinks under a softcap are not wired"
        return super().refuses(instance)

    def build(self, instance: OpInstance) -> Kernel:
        attrs, fault = instance.attrs, self.fault
        group, pool_layer, wide = attrs["group"], attrs["pool_layer"], attrs["v_head_dim"]
        rule = Rule(
            attrs["scale"],
            attrs["window"],
            attrs["softcap"],
            attrs["alibi"],
            ahead=1 if fault == "mask_off_by_one" else 0,
            softmax=torch.float16 if fault == "half_softmax" else torch.float32,
        )

        def attend(q: Any, k: Any, v: Any, keys: Any, values: Any, plan: AcmePlan, w: Packed) -> torch.Tensor:
            store(keys, k, plan, group)
            store(values, v, plan, group)
            result: torch.Tensor = q.new_zeros(*q.shape[:2], wide)
            for run in requests(plan, group, rule.window):
                kk, vv = keys_of(keys, run.pages), keys_of(values, run.pages)
                rows, base = q[run.start : run.stop], run.skipped * plan.page_tokens
                out = weighted(rows, kk, vv, run, base, rule, w[0] if w else None)
                result[run.start : run.stop] = out.to(q.dtype)
            return result

        def attention(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, plan: AcmePlan, w: Packed = ()
        ) -> tuple[torch.Tensor, State]:
            keys, values = state[pool_layer]
            return CHIP.launch(attend, q, k, v, keys.blocks, values.blocks, plan, w), state

        return attention


class LatentAttention(Attention):
    """Multi-head latent attention: queries and results change their space, cached latents stay as they are."""

    op = "mla_attention"

    def refuses(self, instance: OpInstance) -> str:
        for name in ("latent_dim", "rope_dim"):
            if instance.attrs[name] % LANES:
                return f"{name} {instance.attrs[name]} is not a multiple of {LANES}"
        return AcmeProvider.refuses(self, instance)

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs
        heads, nope, latent_dim = attrs["heads"], attrs["nope_dim"], attrs["latent_dim"]
        group, pool_layer = attrs["group"], attrs["pool_layer"]
        rule = Rule(attrs["scale"])

        def attend(
            q_nope: Any, q_rope: Any, latent: Any, k_rope: Any, latents: Any, ropes: Any, plan: AcmePlan, w: Packed
        ) -> torch.Tensor:
            store(latents, latent[:, None], plan, group)
            store(ropes, k_rope[:, None], plan, group)
            expand = w[0].float().view(heads, -1, latent_dim)
            absorbed = torch.einsum("thn,hnc->thc", q_nope.float(), expand[:, :nope])
            queries = torch.cat((absorbed, q_rope.float()), dim=-1)
            mixed = torch.zeros(*q_nope.shape[:2], latent_dim)
            for run in requests(plan, group, None):
                values = keys_of(latents, run.pages)
                keys = torch.cat((values.float(), keys_of(ropes, run.pages).float()), dim=-1)
                mixed[run.start : run.stop] = weighted(queries[run.start : run.stop], keys, values, run, 0, rule, None)
            return torch.einsum("thc,hvc->thv", mixed, expand[:, nope:]).to(q_nope.dtype)

        def mla_attention(
            q_nope: torch.Tensor,
            q_rope: torch.Tensor,
            latent: torch.Tensor,
            k_rope: torch.Tensor,
            state: State,
            plan: AcmePlan,
            w: Packed,
        ) -> tuple[torch.Tensor, State]:
            latents, ropes = state[pool_layer]
            out = CHIP.launch(attend, q_nope, q_rope, latent, k_rope, latents.blocks, ropes.blocks, plan, w)
            return out, state

        return mla_attention
