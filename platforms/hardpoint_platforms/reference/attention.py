"""Paged attention: store the new keys and values, gather each request's pages, softmax in float32.

    score(q, k) = softcap(scale * q.k) + slope * (position(k) - position(q))      where 0 <= distance < window

A sink is one more logit per head that takes part in the softmax and carries no value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.reference.plan import Chunk, DecodeBlock, ReferencePlan
from hardpoint_platforms.state_cache import State

#: Scores held at once while a long prompt is attended; small blocks also skip more of what causality hides.
SCORE_ELEMENTS = 1 << 21

#: Reads pages: int64 [..., P] -> keys [..., P * page_tokens, heads, d] and values [..., P * page_tokens, heads, dv].
PageReader = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class ScoreRule:
    """How scores are made, apart from the dot product."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None


def build_attention(instance: OpInstance) -> Kernel:
    """attention(q[T, h, d], k[T, hk, d], v[T, hk, dv], state, plan, (sinks[h]?,)) -> (out[T, h, dv], state)."""
    attrs = instance.attrs
    group, pool_layer = attrs["group"], attrs["pool_layer"]
    rule = ScoreRule(attrs["scale"], attrs["window"], attrs["softcap"], attrs["alibi"])

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: State,
        plan: ReferencePlan,
        w: Packed = (),
    ) -> tuple[torch.Tensor, State]:
        keys, values = state[pool_layer]
        store(keys, k, plan, group)
        store(values, v, plan, group)

        def read(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gather(keys, table), gather(values, table)

        sinks = w[0] if w else None
        return paged_attention(q, read, plan, group, rule, v.shape[-1], sinks), state

    return attention


def store(cache: torch.Tensor, x: torch.Tensor, plan: ReferencePlan, group: int) -> None:
    """Write x[T, heads, width] into cache[pages, page_tokens, heads, width]; padding goes to page 0."""
    cache[plan.pages[group], plan.offsets[group]] = x.to(cache.dtype)


def gather(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Copy pages table[..., P] out of the cache: [..., P * page_tokens, heads, width]."""
    return cache[table].flatten(-4, -3)


def paged_attention(
    q: torch.Tensor,
    read: PageReader,
    plan: ReferencePlan,
    group: int,
    rule: ScoreRule,
    v_head_dim: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend for a ragged batch whose new keys are stored already: q[T, h, d] -> [T, h, v_head_dim]."""
    pieces = [_decode(q, read, block, plan.page_tokens, group, rule, sinks) for block in plan.blocks]
    for chunk in plan.chunks:
        pieces.extend(_prefill(q, read, chunk, plan.page_tokens, group, rule, sinks))
    if not pieces:
        return q.new_zeros((q.shape[0], q.shape[1], v_head_dim))
    return plan.join(pieces)


def _decode(
    q: torch.Tensor,
    read: PageReader,
    block: DecodeBlock,
    page_tokens: int,
    group: int,
    rule: ScoreRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    table = block.tables[group]
    columns = torch.arange(table.shape[1], device=q.device)[None]
    if rule.window is not None:
        # a window touches at most this many pages, wherever it starts
        reach = -(-(rule.window - 1) // page_tokens) + 1
        if reach < table.shape[1]:
            first = (block.last - rule.window + 1).clamp(min=0) // page_tokens
            columns = first[:, None] + torch.arange(reach, device=q.device)
            table = table.gather(1, columns.clamp(max=table.shape[1] - 1))
    offsets = torch.arange(page_tokens, device=q.device)
    key_positions = (columns[..., None] * page_tokens + offsets).flatten(-2)
    keys, values = read(table)
    rows = q.index_select(0, block.tokens)[:, None]
    return attend(rows, keys, values, block.last[:, None], key_positions, rule, sinks)[:, 0]


def _prefill(
    q: torch.Tensor,
    read: PageReader,
    chunk: Chunk,
    page_tokens: int,
    group: int,
    rule: ScoreRule,
    sinks: torch.Tensor | None,
) -> list[torch.Tensor]:
    length = chunk.computed + chunk.stop - chunk.start
    skipped = 0 if rule.window is None else max(0, chunk.computed - rule.window + 1) // page_tokens
    keys, values = read(chunk.tables[group][skipped:])
    base = skipped * page_tokens
    rows = max(1, SCORE_ELEMENTS // (q.shape[1] * length))
    pieces = []
    for start in range(chunk.start, chunk.stop, rows):
        stop = min(start + rows, chunk.stop)
        first = chunk.computed + start - chunk.start
        last = first + stop - start
        low = base if rule.window is None else max(base, first - rule.window + 1)
        pieces.append(
            attend(
                q[None, start:stop],
                keys[None, low - base : last - base],
                values[None, low - base : last - base],
                torch.arange(first, last, device=q.device)[None],
                torch.arange(low, last, device=q.device)[None],
                rule,
                sinks,
            )[0]
        )
    return pieces


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    rule: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of B independent sets.

    q[B, n, h, d], k[B, L, hk, d], v[B, L, hk, dv]; positions int64 [B, n] and [B or 1, L]. Returns [B, n, h, dv].
    """
    batch, count, heads, width = q.shape
    kv_heads = k.shape[2]
    shared = heads // kv_heads
    queries = q.to(torch.float32).unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(batch, kv_heads, shared * count, width)
    scores = queries @ k.to(torch.float32).permute(0, 2, 3, 1)
    scores = scores.unflatten(2, (shared, count)) * rule.scale  # [B, hk, G, n, L]
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    seen = distance >= 0
    if rule.window is not None:
        seen = seen & (distance < rule.window)
    if rule.alibi is not None:
        slopes = torch.tensor(rule.alibi, device=q.device).view(kv_heads, shared, 1, 1)
        scores = scores - slopes * distance[:, None, None]
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    weights = _softmax(scores, sinks)
    # what no query sees may hold anything, and 0 * nan is nan
    values = v.to(torch.float32).masked_fill(~seen.any(1)[:, :, None, None], 0.0)
    out: torch.Tensor = weights.flatten(2, 3) @ values.transpose(1, 2)
    out = out.unflatten(2, (shared, count)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out.to(dtype=q.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension of [B, hk, G, n, L]; sinks float [hk * G] add a logit without a value."""
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.to(torch.float32).view(1, scores.shape[1], scores.shape[2], 1, 1)
    joined = torch.cat((scores, extra.expand(*scores.shape[:-1], 1)), dim=-1)
    weights: torch.Tensor = torch.softmax(joined, dim=-1)[..., :-1]
    return weights
