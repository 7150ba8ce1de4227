"""Mixture of experts: choosing experts per token, and running them."""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.reference.activation import FUNCTIONS, gate_with
from hardpoint_platforms.reference.linear import product_with


def build_moe_route(instance: OpInstance) -> Kernel:
    """moe_route(logits[T, E], (bias[E]?,)) -> (weights float32 [T, k], ids int64 [T, k])."""
    attrs = instance.attrs
    top_k, score, scale = attrs["top_k"], attrs["score"], attrs["scale"]
    groups, top_groups, group_score = attrs["groups"], attrs["top_groups"], attrs["group_score"]

    def moe_route(logits: torch.Tensor, w: Packed = ()) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.to(torch.float32)
        if score in ("topk_softmax", "topk_sigmoid"):
            best, ids = _top(logits + w[0] if w else logits, top_k)
            best = logits.gather(1, ids) if w else best
            return (best.softmax(-1) if score == "topk_softmax" else best.sigmoid()) * scale, ids
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        choice = scores + w[0] if w else scores  # the bias steers the choice, not the weight
        if groups > 1:
            choice = _only_best_groups(choice, groups, top_groups, group_score)
        _, ids = _top(choice, top_k)
        weights = scores.gather(1, ids)
        if attrs["renormalize"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * scale, ids

    return moe_route


def _top(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row; of equals the lower index."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids[:, :count]


def _only_best_groups(choice: torch.Tensor, groups: int, keep: int, group_score: str) -> torch.Tensor:
    grouped = choice.unflatten(1, (groups, -1))
    if group_score == "max":
        quality = grouped.amax(-1)
    else:
        quality = grouped.topk(2, dim=-1).values.sum(-1)
    _, best = _top(quality, keep)
    kept = torch.zeros_like(quality, dtype=torch.bool).scatter(1, best, True)
    only: torch.Tensor = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    return only


def build_experts(instance: OpInstance) -> Kernel:
    """experts(x[T, H], weights[T, k], ids[T, k], (gate_up, down, gate_up_bias?, down_bias?)) -> [T, H].

    Tokens are sorted by expert and each expert that has some multiplies them once. How many each has is read back to
    the host, once per call: that is what a grouped GEMM of a device avoids.
    """
    attrs = instance.attrs
    experts, on_input = attrs["experts"], attrs["weight_on_input"]
    into, out_of = (product_with(instance.weights[name]) for name in ("gate_up", "down"))

    def hidden(x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        if not attrs["gated"]:
            return FUNCTIONS[attrs["activation"]](x)
        gate, up = (x[..., 0::2], x[..., 1::2]) if attrs["interleaved"] else x.chunk(2, dim=-1)
        return gate_with(gate, up, attrs["activation"], attrs["limit"], attrs["up_offset"])

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w: Packed) -> torch.Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        tokens = order // ids.shape[1]
        share = weights.flatten().index_select(0, order)[:, None].to(torch.float32)
        rows = x.index_select(0, tokens)
        if on_input:
            rows = (rows * share).to(x.dtype)
        parts, start = [], 0
        for expert, count in enumerate(torch.bincount(flat, minlength=experts).tolist()):
            if count == 0:
                continue
            up, down, *biases = (part[expert] for part in w)
            h = into(rows[start : start + count], up)
            h = hidden(h + biases[0] if biases else h).to(x.dtype)
            out = out_of(h, down)
            parts.append(out + biases[1] if biases else out)
            start += count
        if not parts:
            return torch.zeros_like(x)
        result = torch.cat(parts).to(torch.float32)
        if not on_input:
            result = result * share
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return total.index_add(0, tokens, result).to(x.dtype)

    return run
