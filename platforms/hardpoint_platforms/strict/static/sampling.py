"""Sampling of static shape: the reference's, with weights that ask the host nothing.

The reference looks at the leading weights first and asks the host whether they sufficed; here whole rows are sorted.
"""

from __future__ import annotations

from functools import partial

import torch

from hardpoint_platforms.batch import SamplingInputs
from hardpoint_platforms.reference import sampling as reference


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
    count, _ = reference.leading_count(leading, weights.sum(-1), limit, top_p, size)
    return reference.cut_to(weights, leading, count, (top_p >= 1.0) & (limit == size))


build_sample = partial(reference.build_sample, weigh=kept_weights)
build_verify = partial(reference.build_verify, weigh=kept_weights)
draw_tokens = partial(reference.draw_tokens, weigh=kept_weights)
