"""Ops that compute nothing: zeros of the right shape, and the time that a roofline says on the device's clock.

    seconds = max(2 * multiply-adds / operations_per_second, bytes / bytes_per_second) + launch

Bytes are those of weights as they are stored, of arguments and results, and of the cached tokens that attention reads.
Zeros are one number seen under a shape, so a large model takes no memory. Sampling does not look at logits: a token is
a hash of (seed, position), the same in every run. What the table below does not have is left to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch, Logprobs, SampleResult, SamplingInputs
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight, WeightSpec
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.streams import Clock

#: Odd constants of a 64-bit mix (Steele, Lea and Flood, OOPSLA 2014), as signed numbers.
_SEED, _PLACE = -7046029254386353131, -4658895280553007687


class VirtualClock(Clock):
    """Time that passes only when the device works, or when somebody sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


@dataclass(frozen=True)
class Rates:
    """What the device can do: operations and bytes per second, and seconds per op beside them."""

    operations: float
    bytes: float
    launch: float


class SimPlanner(AttentionPlanner):
    """Keeps what attention's time depends on: the batch as it is."""

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch


#: (instance, arguments before the weights) -> results, multiply-adds, bytes beside weights, arguments and results.
Shaper = Callable[[OpInstance, tuple[Any, ...]], tuple[Any, float, float]]


class SimProvider(OpProvider):
    """One op without its computation."""

    def __init__(self, op: str, shaper: Shaper, clock: Clock, rates: Rates, planner: AttentionPlanner | None) -> None:
        self.name = "sim"
        self.op = op
        self.version = CONTRACTS[op].version
        self._shaper, self._clock, self._rates, self._planner = shaper, clock, rates, planner

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "computes nothing")

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        return tuple(_nothing(weight.shape, instance.dtype) for weight in weights.values())

    def packed_bytes(self, packed: Packed) -> Mapping[Hashable, int]:
        return {id(weight): weight.numel() * weight.element_size() for weight in packed}

    def planner(self) -> AttentionPlanner | None:
        return self._planner

    def build(self, instance: OpInstance) -> Kernel:
        stored = sum(_stored_bytes(spec) for spec in instance.weights.values())
        if instance.op == "embedding":
            stored = 0.0  # rows are looked up, the table is not read
        counted = len(CONTRACTS[self.op].weights) > 0
        shaper, clock, rates = self._shaper, self._clock, self._rates

        def kernel(*arguments: Any) -> Any:
            given = arguments[:-1] if counted and arguments and _is_packed(arguments[-1]) else arguments
            results, products, extra = shaper(instance, given)
            moved = stored + extra + _bytes(given) + _bytes(results)
            clock.sleep(max(2.0 * products / rates.operations, moved / rates.bytes) + rates.launch)
            return results

        return kernel


def sim_providers(clock: Clock, rates: Rates) -> tuple[OpProvider, ...]:
    """One per op of the table, all on one clock; attention ops share a planner."""
    planner = SimPlanner()
    paged = ("attention", "mla_attention")
    return tuple(SimProvider(op, shaper, clock, rates, planner if op in paged else None) for op, shaper in _OPS.items())


def _nothing(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(tuple(shape))


def _is_packed(argument: Any) -> bool:
    return isinstance(argument, tuple) and all(isinstance(part, torch.Tensor) for part in argument)


def _bytes(value: Any) -> float:
    """Of the tensors in arguments or results; the paged state is not walked."""
    if isinstance(value, torch.Tensor):
        return float(value.numel() * value.element_size())
    if isinstance(value, tuple):
        return sum(_bytes(part) for part in value if isinstance(part, torch.Tensor))
    return 0.0


def _stored_bytes(spec: WeightSpec) -> float:
    bits = spec.dtype.itemsize * 8.0
    if spec.scheme is not None:
        bits = spec.scheme.bits + (32.0 if spec.scheme.offset else 16.0) / spec.scheme.group
    return math.prod(spec.shape) * bits / 8.0


def _same(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    return _nothing(arguments[0].shape, arguments[0].dtype), 0.0, 0.0


def _same_two(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    return tuple(_nothing(x.shape, x.dtype) for x in arguments[:2]), 0.0, 0.0


def _embedding(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    return _nothing((*arguments[0].shape, instance.weights["weight"].shape[1]), instance.dtype), 0.0, 0.0


def _linear(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    x, outputs = arguments[0], instance.attrs["out_features"]
    return _nothing((*x.shape[:-1], outputs), x.dtype), float(x.numel()) * outputs, 0.0


def _logits(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    x, vocabulary = arguments[0], instance.weights["weight"].shape[0]
    return _nothing((x.shape[0], vocabulary), torch.float32), float(x.numel()) * vocabulary, 0.0


def _gated(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    x = arguments[0]
    return _nothing((*x.shape[:-1], x.shape[-1] // 2), x.dtype), 0.0, 0.0


def _route(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    rows, chosen = arguments[0].shape[0], instance.attrs["top_k"]
    return (_nothing((rows, chosen), torch.float32), torch.arange(chosen).expand(rows, chosen)), 0.0, 0.0


def _experts(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    x, attrs = arguments[0], instance.attrs
    rows, matrices = x.shape[0] * attrs["top_k"], 3 if attrs["gated"] else 2
    distinct = 1.0 - (1.0 - attrs["top_k"] / attrs["experts"]) ** x.shape[0]
    unread = (1.0 - distinct) * sum(_stored_bytes(spec) for spec in instance.weights.values())
    return _nothing(x.shape, x.dtype), float(rows) * matrices * attrs["hidden"] * attrs["intermediate"], -unread


def _attention(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    q, _, _, state, batch = arguments[:5]
    attrs = instance.attrs
    pairs, read = _attended(batch, attrs["window"])
    width = attrs["head_dim"] + attrs["v_head_dim"]
    cached = read * attrs["kv_heads"] * width * q.element_size()
    out = _nothing((q.shape[0], attrs["heads"], attrs["v_head_dim"]), q.dtype)
    return (out, state), pairs * attrs["heads"] * width, cached


def _latent_attention(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    q, _, latent, rope, state, batch = arguments[:6]
    attrs = instance.attrs
    pairs, read = _attended(batch, None)
    cached = read * (latent.shape[-1] + rope.shape[-1]) * q.element_size()
    out = _nothing((q.shape[0], attrs["heads"], attrs["v_head_dim"]), q.dtype)
    return (out, state), pairs * attrs["heads"] * (2 * latent.shape[-1] + rope.shape[-1]), cached


def _attended(batch: AttentionBatch, window: int | None) -> tuple[float, float]:
    """(query, key) pairs that are scored, and cached tokens that are read."""
    count = batch.num_requests
    end = batch.sequence_lengths[:count].astype(np.int64)
    new = np.diff(batch.query_start[: count + 1]).astype(np.int64)
    wide = end if window is None else np.full_like(end, window)
    pairs = _reach(end, wide) - _reach(end - new, wide)
    return float(pairs.sum()), float(np.minimum(end, wide + new - 1).sum())


def _reach(end: Any, wide: Any) -> Any:
    inside = np.minimum(end, wide)
    return inside * (inside + 1) // 2 + (end - inside) * wide


def _sample(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    logits, inputs = arguments[0], arguments[1]
    tokens = _tokens(inputs, logits.shape[-1])
    wanted = inputs.num_logprobs
    result = SampleResult(tokens, None if wanted is None else _even(tokens, logits.shape[-1], wanted))
    return result, 0.0, 0.0


def _tokens(inputs: SamplingInputs, vocabulary: int) -> torch.Tensor:
    mixed = inputs.seeds * _SEED + (inputs.positions + 1) * _PLACE
    mixed = mixed ^ (mixed >> 31)
    return (mixed * _SEED >> 16) % vocabulary


def _logprobs(instance: OpInstance, arguments: tuple[Any, ...]) -> tuple[Any, float, float]:
    logits, tokens, wanted = arguments
    return _even(tokens, logits.shape[-1], wanted), 0.0, 0.0


def _even(tokens: torch.Tensor, vocabulary: int, wanted: int) -> Logprobs:
    """Every token as likely as any other."""
    rows, count = tokens.shape[0], min(wanted, vocabulary)
    each = torch.full((rows,), -math.log(vocabulary))
    top = torch.arange(count).expand(rows, count)
    return Logprobs(each, torch.ones(rows, dtype=torch.int64), top, each[:, None].expand(rows, count))


_OPS: Mapping[str, Shaper] = {
    "embedding": _embedding,
    "linear": _linear,
    "norm": _same,
    "add_norm": _same_two,
    "rope": _same_two,
    "activation": _same,
    "gated_activation": _gated,
    "attention": _attention,
    "mla_attention": _latent_attention,
    "moe_route": _route,
    "experts": _experts,
    "logits": _logits,
    "sample": _sample,
    "logprobs": _logprobs,
}
