"""The form of a step's arguments: every leaf's place, shape and dtype, or its value where it is no tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from hardpoint_platforms.program import BIAS_ENTRIES, TOP_LOGPROBS, Bucket, SamplingShape, StepInputs
from hardpoint_platforms.strict.errors import SignatureChanged

#: Place of a leaf -> what it must be in every run.
Signature = dict[str, str]


def leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """(place, leaf) of a tree of dataclasses, tuples and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from leaves(getattr(value, f.name), f"{place}.{f.name}")
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from leaves(part, f"{place}[{index}]")
    else:
        yield place, value


def signature_of(**trees: Any) -> Signature:
    """The signature of named trees."""
    return {
        place: f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.")
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for name, tree in trees.items()
        for place, leaf in leaves(tree, name)
    }


def require_same(found: Signature, prepared: Signature, program: str) -> None:
    """Raise SignatureChanged, naming the first leaf that differs and both its forms."""
    if found == prepared:
        return
    for place in dict.fromkeys((*prepared, *found)):
        was, now = prepared.get(place, "absent"), found.get(place, "absent")
        if was != now:
            raise SignatureChanged(
                f"signature changed: {place} is {now}, {program} was prepared with {was}: "
                "pad every step of a bucket to the same shapes, and give what varies as tensors"
            )


def require_bucket(bucket: Bucket, inputs: StepInputs) -> None:
    """Raise SignatureChanged where the inputs are not of the bucket's sizes and sampling shape."""
    draws, drawn = inputs.sampling, len(inputs.logits_index)
    # Layers that others follow draw nothing.
    tokens, requests = bucket.tokens or len(inputs.token_ids), bucket.requests if drawn else 0
    wanted: list[tuple[str, Any, Any]] = [
        ("tokens of token_ids", len(inputs.token_ids), tokens),
        ("tokens of positions", len(inputs.positions), tokens),
        ("requests of logits_index", drawn, requests or drawn),
        ("requests of sampling.temperature", len(draws.temperature), requests or drawn),
    ]
    if drawn and bucket.sampling is not SamplingShape.ANY:
        full, greedy = bucket.sampling is SamplingShape.FULL, bucket.sampling is SamplingShape.GREEDY
        bias = len(draws.bias.values) if draws.bias is not None else None
        hidden = len(inputs.hidden_index) if inputs.hidden_index is not None else None
        wanted += [
            ("sampling.all_greedy", draws.all_greedy, greedy),
            ("sampling.filters", draws.filters, not greedy),
            ("sampling.num_logprobs", draws.num_logprobs, TOP_LOGPROBS if full else None),
            ("sampling.penalties", draws.penalties is not None, full),
            ("sampling.allowed", draws.allowed is not None, full),
            ("entries of sampling.bias", bias, requests * BIAS_ENTRIES if full else None),
            ("tokens of hidden_index", hidden, tokens if full else None),
        ]
    for name, found, right in wanted:
        if found != right:
            told = f"{name}: {found!r}, {bucket} promises {right!r}"
            raise SignatureChanged(f"not of the bucket's shape: {told}: pad to it (SamplingShape says how)")
