"""Drawing tokens and scoring them. Draws are the canonical ones: the same seed gives the same token on every device."""

from __future__ import annotations

import dataclasses

import torch

from acme_npu.ops.provider import AcmeProvider
from hardpoint_platforms.batch import LogitBias, Logprobs, Penalties, SampleResult, SamplingInputs
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.reference.draw import pick, uniform


def constrained(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Logits after the allowed mask, biases and penalties."""
    if inputs.allowed is not None:
        bits = (inputs.allowed[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
        logits = logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))
    if inputs.bias is not None:
        logits = _biased(logits, inputs.bias)
    return logits if inputs.penalties is None else _penalized(logits, inputs.penalties)


def _biased(logits: torch.Tensor, bias: LogitBias) -> torch.Tensor:
    return logits.index_put((bias.rows, bias.tokens), bias.values, accumulate=True)


def _penalized(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    rows, size = logits.shape
    history = penalties.history
    ours = torch.arange(history.shape[1]) >= penalties.prompt_lengths[:, None]
    occurred = torch.zeros(rows, size + 1).scatter_add_(1, history, torch.ones(history.shape))[:, :size]
    made = torch.zeros(rows, size + 1).scatter_add_(1, history, ours.float())[:, :size]
    factor = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    out = torch.where(occurred > 0, repeated, logits)
    return out - penalties.frequency[:, None] * made - penalties.presence[:, None] * (made > 0)


def drawn(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Tokens int64 [R] of constrained logits."""
    best = logits.argmax(-1)
    if inputs.all_greedy:
        return best
    heat = torch.where(inputs.temperature > 0, inputs.temperature, 1.0).double()[:, None]
    weights = ((logits.double() - logits.amax(-1, keepdim=True)) / heat).exp()
    weights, order = weights.sort(dim=-1, descending=True, stable=True)
    if inputs.filters:
        place = torch.arange(weights.shape[1])
        weights = weights.masked_fill(weights < inputs.min_p.double()[:, None], 0.0)
        limit = torch.where(inputs.top_k > 0, inputs.top_k, weights.shape[1])[:, None]
        weights = weights.masked_fill(place >= limit, 0.0)
        top_p = inputs.top_p.double()[:, None]
        before = weights.cumsum(-1) - weights
        weights = weights.masked_fill(
            (before >= top_p * weights.sum(-1, keepdim=True)) & (top_p < 1) & (place > 0), 0.0
        )
    share = torch.zeros_like(weights).scatter(1, order, weights)
    return torch.where(inputs.temperature > 0, pick(share, uniform(inputs.seeds, inputs.positions), best), best)


def scored(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    """Log-probabilities of the given tokens, and of the k likeliest, lower ids first among equals."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    top, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return Logprobs(chosen[:, 0], (logprobs > chosen).sum(-1) + 1, ids[:, :k].clone(), top[:, :k].clone())


class Sample(AcmeProvider):
    """The whole of the contract."""

    op = "sample"

    def build(self, instance: OpInstance) -> Kernel:
        fault = self.fault

        def sample(logits: torch.Tensor, inputs: SamplingInputs) -> SampleResult:
            if fault == "rng_per_batch":
                inputs = dataclasses.replace(inputs, seeds=inputs.seeds[:1].expand_as(inputs.seeds))
            tokens = drawn(constrained(logits, inputs), inputs)
            scores = None if inputs.num_logprobs is None else scored(logits, tokens, inputs.num_logprobs)
            return SampleResult(tokens, scores, logits.isfinite().all(-1))

        return self.launched(sample)


class Score(AcmeProvider):
    """Log-probabilities of given tokens."""

    op = "logprobs"

    def build(self, instance: OpInstance) -> Kernel:
        return self.launched(scored)
