"""Sampling of static shape. Draws equal the reference's: same order of work, same function of (seed, position).

The reference looks at the leading weights first and asks the host whether they sufficed; here whole rows are sorted.
"""

from __future__ import annotations

import torch

from hardpoint_platforms.batch import SampleResult, SamplingInputs, VerifyResult
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.reference.draw import ACCEPT, pick, uniform
from hardpoint_platforms.reference.logit_rules import adjust
from hardpoint_platforms.reference.sampling import WIDE_ELEMENTS, assemble, cut_to, leading_count, score


def build_sample(instance: OpInstance) -> Kernel:
    """sample(logits[R, V], inputs) -> SampleResult."""

    def sample(logits: torch.Tensor, inputs: SamplingInputs) -> SampleResult:
        raw = logits.to(torch.float32)
        tokens = draw_tokens(adjust(raw, inputs), inputs)
        if inputs.num_logprobs is None:
            return SampleResult(tokens)
        return SampleResult(tokens, score(raw, tokens, inputs.num_logprobs))

    return sample


def build_verify(instance: OpInstance) -> Kernel:
    """verify(logits[R, K + 1, V], draft_ids[R, K], draft_lengths[R], draft_probs[R, K, V]?, inputs) -> VerifyResult."""

    def verify(
        logits: torch.Tensor,
        draft_ids: torch.Tensor,
        draft_lengths: torch.Tensor,
        draft_probs: torch.Tensor | None,
        inputs: SamplingInputs,
    ) -> VerifyResult:
        adjusted = adjust(logits.flatten(0, 1).to(torch.float32), inputs)
        if draft_probs is not None:
            return _verify_drawn(adjusted, draft_ids, draft_lengths, draft_probs, inputs)
        rows, depth = draft_ids.shape
        own = draw_tokens(adjusted, inputs).unflatten(0, (rows, depth + 1))
        return assemble(own, own[:, :depth] == draft_ids, draft_ids, draft_lengths)

    return verify


def draw_tokens(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Tokens int64 [R] of adjusted logits float32 [R, V]."""
    if inputs.all_greedy:
        return logits.argmax(-1)
    u = uniform(inputs.seeds, inputs.positions)
    step = max(1, WIDE_ELEMENTS // logits.shape[1])
    parts = []
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        best = logits[rows].argmax(-1)
        drawn = pick(kept_weights(logits[rows], inputs, rows), u[rows], best)
        parts.append(torch.where(inputs.temperature[rows] > 0, drawn, best))
    return torch.cat(parts) if parts else inputs.positions.new_zeros(0)


def kept_weights(logits: torch.Tensor, inputs: SamplingInputs, rows: slice) -> torch.Tensor:
    """exp((logit - max) / temperature), float64 [rows, V], 0 where a filter drops the token. The largest is 1."""
    temperature = inputs.temperature[rows].to(torch.float64)
    temperature = torch.where(temperature > 0, temperature, 1.0)[:, None]
    wide = logits.to(torch.float64)
    weights = ((wide - wide.amax(-1, keepdim=True)) / temperature).exp()
    if not inputs.filters:
        return weights
    floor = inputs.min_p[rows].to(torch.float64)[:, None]
    weights = torch.where(weights >= floor, weights, 0.0)
    top_k, top_p, size = inputs.top_k[rows], inputs.top_p[rows].to(torch.float64), weights.shape[1]
    limit = torch.where((top_k <= 0) | (top_k > size), size, top_k)
    leading = weights.sort(dim=-1, descending=True).values
    count, _ = leading_count(leading, weights.sum(-1), limit, top_p, size)
    return cut_to(weights, leading, count, (top_p >= 1.0) & (limit == size))


def _verify_drawn(
    logits: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_lengths: torch.Tensor,
    draft_probs: torch.Tensor,
    inputs: SamplingInputs,
) -> VerifyResult:
    """Rejection sampling (Leviathan et al. 2023): accept with min(1, p / q), else draw from max(p - q, 0)."""
    rows, depth = draft_ids.shape
    best = logits.argmax(-1)
    weights = kept_weights(logits, inputs, slice(None))
    certain = torch.zeros_like(weights).scatter(1, best[:, None], 1.0)
    p = torch.where((inputs.temperature > 0)[:, None], weights / weights.sum(-1, keepdim=True), certain)
    p = p.unflatten(0, (rows, depth + 1))
    places = torch.arange(depth, device=logits.device)
    q = draft_probs.to(torch.float64) * (places < draft_lengths[:, None])[..., None]
    u = uniform(inputs.seeds, inputs.positions, ACCEPT).unflatten(0, (rows, depth + 1))[:, :depth]
    at = draft_ids[..., None]
    accepted = u * q.gather(2, at)[..., 0] < p[:, :depth].gather(2, at)[..., 0]
    rest = (p - torch.cat((q, torch.zeros_like(p[:, :1])), dim=1)).clamp(min=0.0).flatten(0, 1)
    own = pick(rest, uniform(inputs.seeds, inputs.positions), best).unflatten(0, (rows, depth + 1))
    return assemble(own, accepted, draft_ids, draft_lengths)
