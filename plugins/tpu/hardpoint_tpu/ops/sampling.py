"""Sampling: the reference's own, with the weights of the tokens computed by one sort of values.

The random numbers are the reference's bit by bit, whole numbers of 64 bits. On the processor weights are float64 as the
reference's; a TPU has none, and the contract leaves room for float32: the draw may differ where a number lies within
2**-14 of the border between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from hardpoint_platforms.batch import SamplingInputs
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.reference.sampling import build_sample, build_verify
from hardpoint_tpu.kernels_table import TpuProvider
from hardpoint_tpu.runtime import lifted
from hardpoint_tpu.sums import running_sum

OPS = ("sample", "verify")


class SortedSampling(TpuProvider):
    """`sample` and `verify`."""

    name = "sorted"

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "one sort of values per drawn row")

    def build(self, instance: OpInstance) -> Kernel:
        make = build_sample if instance.op == "sample" else build_verify
        weigh = kept_weights(self.runtime.wrap)
        return self.kernels.bind(self, instance, lambda placed: make(placed, weigh=weigh))


def kept_weights(
    wrap: Callable[[Any], torch.Tensor],
) -> Callable[[torch.Tensor, SamplingInputs, slice], torch.Tensor]:
    """(logits, inputs, rows) -> exp((logit - max) / temperature), float64, 0 where a filter drops the token."""
    plain, filtered = lifted(_weights, wrap), lifted(_filtered, wrap)

    def weigh(logits: torch.Tensor, inputs: SamplingInputs, rows: slice) -> torch.Tensor:
        weights = plain(logits, inputs.temperature[rows])
        if not inputs.filters:
            return weights
        return filtered(weights, inputs.min_p[rows], inputs.top_k[rows], inputs.top_p[rows])

    return weigh


def _weights(logits: Any, temperature: Any) -> Any:
    wide = logits.astype(jnp.float64)
    heat = jnp.where(temperature > 0, temperature.astype(jnp.float64), 1.0)[:, None]
    return jnp.exp((wide - wide.max(-1, keepdims=True)) / heat)


def _filtered(weights: Any, min_p: Any, top_k: Any, top_p: Any) -> Any:
    """Min-p, then top-k, then top-p; of equal weights the lower ids stay."""
    size = weights.shape[1]
    weights = jnp.where(weights >= min_p.astype(jnp.float64)[:, None], weights, 0.0)
    share = top_p.astype(jnp.float64)
    limit = jnp.where((top_k <= 0) | (top_k > size), size, top_k)
    leading = -jnp.sort(-weights, axis=-1)
    sums = running_sum(leading)
    inside = jnp.take_along_axis(sums, (limit - 1)[:, None], 1)[:, 0]
    total = jnp.where(limit < size, inside, weights.sum(-1))
    below = (sums < (share * total)[:, None]).sum(-1) + 1
    count = jnp.minimum(jnp.where(share >= 1.0, limit, below), limit).clip(1, size)
    edge = jnp.take_along_axis(leading, (count - 1)[:, None], 1)
    above, level = weights > edge, weights == edge
    room = count - above.sum(-1)
    kept = above | (level & (running_sum(level) <= room[:, None]))
    everything = (share >= 1.0) & (limit == size)
    return jnp.where(kept | everything[:, None], weights, 0.0)
