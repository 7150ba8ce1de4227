"""What an op must move and multiply at least: bytes and multiply-adds from its attributes and the sizes of a call.

Bytes are those of weights in the kernel's own layout, of arguments and results, each once, and of the cached tokens
that are read and written. What a kernel moves on top of that (a second pass, scratch memory) is its own loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint_platforms.ops.contract import OpInstance


@dataclass(frozen=True)
class Attended:
    """What the batch of a step means for one attention op.

    Attributes:
        pairs: (query, key) pairs that are scored, window and causality respected.
        read: cached tokens that are read, once per request, those of this step among them.
        written: tokens stored.
        item_bytes: of one cached number.
    """

    pairs: int
    read: int
    written: int
    item_bytes: int


@dataclass(frozen=True)
class Call:
    """Sizes of one call.

    Attributes:
        instance: the op.
        rows: first dimension of the first argument: tokens, or draws.
        sizes: numbers in each positional argument, 0 for what is no tensor.
        weight_bytes: of its packed weights.
        attended: for attention.
        experts: distinct experts that the step chose, for `experts`.
    """

    instance: OpInstance
    rows: int
    sizes: tuple[int, ...]
    weight_bytes: int = 0
    attended: Attended | None = None
    experts: int = 0


@dataclass(frozen=True)
class Cost:
    """Bytes and multiply-adds of one call. An op that multiplies no matrices has 0."""

    bytes: float
    multiply_adds: float = 0.0


def cost_of(call: Call) -> Cost | None:
    """None for an op that the table does not know."""
    formula = COSTS.get(call.instance.op)
    return None if formula is None else formula(call, call.instance.attrs, call.instance.dtype.itemsize)


def attended(queries: list[int], lengths: list[int], window: int | None, item_bytes: int) -> Attended:
    """Of requests with `queries` new tokens each and `lengths` tokens after them."""
    pairs = read = 0
    for new, length in zip(queries, lengths, strict=True):
        reach = length if window is None else window
        pairs += sum(min(position + 1, reach) for position in range(length - new, length))
        read += min(length, reach + new - 1)
    return Attended(pairs, read, sum(queries), item_bytes)


def _embedding(call: Call, attrs: Mapping[str, Any], item: int) -> Cost:
    entries, width = call.instance.weights["weight"].shape
    return Cost(call.rows * (call.weight_bytes / entries + 8 + width * item))


def _linear(call: Call, attrs: Mapping[str, Any], item: int) -> Cost:
    inputs, outputs = attrs["in_features"], attrs["out_features"]
    return Cost(call.weight_bytes + call.rows * (inputs + outputs) * item, call.rows * inputs * outputs)


def _logits(call: Call, attrs: Mapping[str, Any], item: int) -> Cost:
    vocabulary, width = call.instance.weights["weight"].shape
    return Cost(call.weight_bytes + call.rows * (width * item + vocabulary * 4), call.rows * vocabulary * width)


def _gated_mlp(call: Call, attrs: Mapping[str, Any], item: int) -> Cost:
    hidden, inner = attrs["hidden"], attrs["intermediate"]
    return Cost(call.weight_bytes + call.rows * 2 * hidden * item, call.rows * 3 * hidden * inner)


def _behind_norm(behind: Callable[[Call, Mapping[str, Any], int], Cost]) -> Callable[..., Cost]:
    """Of an op whose input is a norm's: x is read as ever; the residual is read and the sum written beside that."""

    def cost(call: Call, attrs: Mapping[str, Any], item: int) -> Cost:
        own = behind(call, attrs, item)
        return Cost(own.bytes + (call.sizes[0] + call.sizes[1]) * item, own.multiply_adds)

    return cost


def _experts(call: Call, attrs: Mapping[str, Any], item: int) -> Cost:
    hidden, inner = attrs["hidden"], attrs["intermediate"]
    matrices = 3 if attrs["gated"] else 2
    weights = call.weight_bytes * call.experts / attrs["experts"]
    moved = weights + call.rows * (2 * hidden * item + attrs["top_k"] * 12)
    return Cost(moved, call.rows * attrs["top_k"] * matrices * hidden * inner)


def _route(call: Call, attrs: Mapping[str, Any], item: int) -> Cost:
    return Cost(call.rows * (attrs["experts"] * item + attrs["top_k"] * 12))


def _pass(numbers: float) -> Callable[[Call, Mapping[str, Any], int], Cost]:
    """`numbers` are moved for each number of the first argument, and the weights once."""
    return lambda call, attrs, item: Cost(numbers * call.sizes[0] * item + call.weight_bytes)


def _rope(call: Call, attrs: Mapping[str, Any], item: int) -> Cost:
    table = call.rows * attrs["rotary_dim"] * 4
    return Cost(2 * (call.sizes[0] + call.sizes[1]) * item + table + call.rows * 8)


def _attention(call: Call, attrs: Mapping[str, Any], item: int) -> Cost | None:
    batch = call.attended
    if batch is None:
        return None
    width = attrs["head_dim"] + attrs["v_head_dim"]
    cached = attrs["kv_heads"] * width * batch.item_bytes
    out = call.rows * attrs["heads"] * attrs["v_head_dim"]
    moved = (sum(call.sizes[:3]) + out) * item + (batch.read + batch.written) * cached
    return Cost(moved, batch.pairs * attrs["heads"] * width)


def _rotary_attention(call: Call, attrs: Mapping[str, Any], item: int) -> Cost | None:
    """Attention, a row of the table and a position for each token, and what weights there are beside the table."""
    inner = _attention(call, attrs, item)
    if inner is None:
        return None
    others = sum(math.prod(spec.shape) * 4 for name, spec in call.instance.weights.items() if name != "table")
    return Cost(inner.bytes + call.rows * (attrs["rotary_dim"] * 4 + 8) + others, inner.multiply_adds)


def _mla(call: Call, attrs: Mapping[str, Any], item: int) -> Cost | None:
    """As decoding does it: queries and sums in the latent space, expanded once per query."""
    batch = call.attended
    if batch is None:
        return None
    latent, rope, heads = attrs["latent_dim"], attrs["rope_dim"], attrs["heads"]
    out = call.rows * heads * attrs["v_head_dim"]
    moved = (sum(call.sizes[:4]) + out) * item + call.weight_bytes
    moved += (batch.read + batch.written) * (latent + rope) * batch.item_bytes
    expanded = call.rows * heads * latent * (attrs["nope_dim"] + attrs["v_head_dim"])
    return Cost(moved, batch.pairs * heads * (2 * latent + rope) + expanded)


def _logit_pass(call: Call, attrs: Mapping[str, Any], item: int) -> Cost:
    return Cost(call.sizes[0] * 4)


COSTS: Mapping[str, Callable[[Call, Mapping[str, Any], int], Cost | None]] = {
    "embedding": _embedding,
    "linear": _linear,
    "logits": _logits,
    "gated_mlp": _gated_mlp,
    "norm_linear": _behind_norm(_linear),
    "norm_gated_mlp": _behind_norm(_gated_mlp),
    "moe_route": _route,
    "experts": _experts,
    "norm": _pass(2),
    "add_norm": _pass(4),
    "activation": _pass(2),
    "gated_activation": _pass(1.5),
    "rope": _rope,
    "attention": _attention,
    "rotary_attention": _rotary_attention,
    "mla_attention": _mla,
    "sample": _logit_pass,
    "logprobs": _logit_pass,
}
