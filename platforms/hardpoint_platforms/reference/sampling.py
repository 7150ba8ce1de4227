"""Sampling: filters, the draw, log-probabilities, and the verification of drafts.

Tokens of a row are ordered by weight, equals by id. Top-k keeps the first k of that order; top-p the shortest beginning
whose share of the weight left by min-p and top-k reaches p. Nothing in a row depends on another row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hardpoint_platforms.batch import Logprobs, SampleResult, SamplingInputs, VerifyResult
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.reference.draw import ACCEPT, pick, uniform
from hardpoint_platforms.reference.logit_rules import adjust

#: Logits that are widened to float64 at once.
WIDE_ELEMENTS = 1 << 22
#: Leading weights looked at before whole rows are sorted, where a look from the host costs nothing.
HEADS = (256, 4096)
#: (logits [rows, V], inputs, rows) -> float64 [rows, V]: exp((logit - max) / temperature), 0 where a filter drops one.
Weigh = Callable[[torch.Tensor, SamplingInputs, slice], torch.Tensor]


def build_sample(instance: OpInstance, weigh: Weigh | None = None) -> Kernel:
    """sample(logits[R, V], inputs) -> SampleResult. `weigh`: another way to the same weights."""

    def sample(logits: torch.Tensor, inputs: SamplingInputs) -> SampleResult:
        raw = logits.to(torch.float32)
        tokens = draw_tokens(adjust(raw, inputs), inputs, weigh)
        if inputs.num_logprobs is None:
            return SampleResult(tokens)
        return SampleResult(tokens, score(raw, tokens, inputs.num_logprobs))

    return sample


def build_logprobs(instance: OpInstance) -> Kernel:
    """logprobs(logits[N, V], token_ids[N], k) -> Logprobs."""
    return lambda logits, token_ids, k: score(logits, token_ids, k)


def build_verify(instance: OpInstance, weigh: Weigh | None = None) -> Kernel:
    """verify(logits[R, K + 1, V], draft_ids[R, K], draft_lengths[R], draft_probs[R, K, V]?, inputs) -> VerifyResult."""

    def verify(
        logits: torch.Tensor,
        draft_ids: torch.Tensor,
        draft_lengths: torch.Tensor,
        draft_probs: torch.Tensor | None,
        inputs: SamplingInputs,
    ) -> VerifyResult:
        adjusted = adjust(logits.flatten(0, 1).to(torch.float32), inputs)
        if draft_probs is None:
            return _verify_certain(adjusted, draft_ids, draft_lengths, inputs, weigh)
        return _verify_drawn(adjusted, draft_ids, draft_lengths, draft_probs, inputs, weigh or _weights)

    return verify


def draw_tokens(logits: torch.Tensor, inputs: SamplingInputs, weigh: Weigh | None = None) -> torch.Tensor:
    """Tokens int64 [R] of adjusted logits float32 [R, V]."""
    weigh = weigh or _weights
    if inputs.all_greedy:
        return logits.argmax(-1)
    u = uniform(inputs.seeds, inputs.positions)
    step = max(1, WIDE_ELEMENTS // logits.shape[1])
    parts = []
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        best = logits[rows].argmax(-1)
        drawn = pick(weigh(logits[rows], inputs, rows), u[rows], best)
        parts.append(torch.where(inputs.temperature[rows] > 0, drawn, best))
    return torch.cat(parts) if parts else inputs.positions.new_zeros(0)


def _weights(logits: torch.Tensor, inputs: SamplingInputs, rows: slice) -> torch.Tensor:
    """exp((logit - max) / temperature), float64, 0 where a filter drops the token. The largest is 1."""
    temperature = inputs.temperature[rows].to(torch.float64)
    temperature = torch.where(temperature > 0, temperature, 1.0)[:, None]
    weights = logits.to(torch.float64, copy=True)  # one copy, worked on in place: the vocabulary is wide
    weights.sub_(weights.amax(-1, keepdim=True)).div_(temperature).exp_()
    if not inputs.filters:
        return weights
    floor = inputs.min_p[rows].to(torch.float64)[:, None]
    weights = torch.where(weights >= floor, weights, 0.0)
    return _keep_leading(weights, inputs.top_k[rows], inputs.top_p[rows].to(torch.float64))


def _keep_leading(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the leading weights of each row."""
    size = weights.shape[1]
    limit = torch.where((top_k <= 0) | (top_k > size), size, top_k)
    everything = (top_p >= 1.0) & (limit == size)
    whole = weights.sum(-1)
    for head in HEADS if weights.device.type == "cpu" else ():
        if head < size:
            leading = weights.topk(head, dim=-1).values
            count, settled = leading_count(leading, whole, limit, top_p, size)
            if bool((settled | everything).all()):
                return cut_to(weights, leading, count, everything)
    leading = weights.sort(dim=-1, descending=True).values
    count, _ = leading_count(leading, whole, limit, top_p, size)
    return cut_to(weights, leading, count, everything)


def leading_count(
    leading: torch.Tensor, whole: torch.Tensor, limit: torch.Tensor, top_p: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of a row's sorted weights stay, and whether these weights sufficed to say so.

    leading: float64 [R, n], the n largest, descending; whole: their row's sum; limit: int64 [R], from top-k; size: of
    a row. Top-p is a share of what top-k leaves, so where top-k ends behind these weights they do not suffice.
    """
    known = leading.shape[1]
    cumulative = leading.cumsum(-1)
    last = limit.clamp(max=known) - 1
    total = torch.where(limit < size, cumulative.gather(1, last[:, None])[:, 0], whole)
    target = top_p * total
    below = (cumulative < target[:, None]).sum(-1) + 1  # the shortest beginning that reaches the target
    by_p = torch.where(top_p >= 1.0, limit, below)
    count = torch.minimum(by_p, limit).clamp(min=1)
    settled = (limit <= known) | ((limit == size) & (top_p < 1.0) & (count <= known))
    return count.clamp(max=known), settled


def cut_to(weights: torch.Tensor, leading: torch.Tensor, count: torch.Tensor, everything: torch.Tensor) -> torch.Tensor:
    """Keep the first `count` of each row in the order of weight, then id."""
    edge = leading.gather(1, count[:, None] - 1)
    above, level = weights > edge, weights == edge
    room = count - above.sum(-1)
    kept = above | (level & (level.cumsum(-1) <= room[:, None]))
    return torch.where(kept | everything[:, None], weights, 0.0)


def score(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    """Log-probabilities of the given tokens and of the k likeliest; of equals the lower id comes first."""
    size = logits.shape[1]
    step = max(1, WIDE_ELEMENTS // size)
    parts = [
        _score(logits[start : start + step], token_ids[start : start + step], min(k, size))
        for start in range(0, max(1, logits.shape[0]), step)
    ]
    if len(parts) == 1:
        return parts[0]
    return Logprobs(
        torch.cat([p.chosen for p in parts]),
        torch.cat([p.rank for p in parts]),
        torch.cat([p.top_ids for p in parts]),
        torch.cat([p.top for p in parts]),
    )


def _score(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    logprobs = torch.log_softmax(logits.to(torch.float32), dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    rank = (logprobs > chosen).sum(-1) + 1
    ids = logprobs.topk(k, dim=-1).indices.sort(dim=-1).values
    top, order = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return Logprobs(chosen[:, 0], rank, ids.gather(1, order), top)


def _verify_certain(
    logits: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_lengths: torch.Tensor,
    inputs: SamplingInputs,
    weigh: Weigh | None,
) -> VerifyResult:
    """Drafts without probabilities: accept a token where the target's own draw is that token.

    This is rejection sampling against a draft that is certain of its token, with the draw of the plain sampler, so that
    the text is the same with and without drafts.
    """
    rows, depth = draft_ids.shape
    own = draw_tokens(logits, inputs, weigh).unflatten(0, (rows, depth + 1))
    return assemble(own, own[:, :depth] == draft_ids, draft_ids, draft_lengths)


def _verify_drawn(
    logits: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_lengths: torch.Tensor,
    draft_probs: torch.Tensor,
    inputs: SamplingInputs,
    weigh: Weigh,
) -> VerifyResult:
    """Rejection sampling (Leviathan et al. 2023): accept with min(1, p / q), else draw from max(p - q, 0)."""
    rows, depth = draft_ids.shape
    best = logits.argmax(-1)
    weights = weigh(logits, inputs, slice(None))
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


def assemble(
    own: torch.Tensor, accepted: torch.Tensor, draft_ids: torch.Tensor, draft_lengths: torch.Tensor
) -> VerifyResult:
    """Accepted beginning of the draft, then the target's own token at the first place that is not accepted."""
    rows, depth = draft_ids.shape
    places = torch.arange(depth + 1, device=own.device)
    accepted = accepted & (places[:depth] < draft_lengths[:, None])
    taken = accepted.long().cumprod(-1).sum(-1)[:, None]
    drafts = torch.cat((draft_ids, draft_ids.new_full((rows, 1), -1)), dim=1)
    tokens = torch.where(places < taken, drafts, torch.where(places == taken, own, -1))
    return VerifyResult(tokens, taken[:, 0] + 1)
