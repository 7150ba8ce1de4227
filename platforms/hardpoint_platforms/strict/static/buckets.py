"""Programs of static size: prompts of one request, and decodes of one token for each of several requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hardpoint_platforms.capabilities import BatchLimits
from hardpoint_platforms.program import Bucket, SamplingShape

#: Shapes of sampling that such programs are built for. Each serves whatever those before it do.
SAMPLING_SHAPES = (SamplingShape.GREEDY, SamplingShape.DRAW, SamplingShape.FULL)
#: Tokens of the smallest program that takes prompts.
PREFILL_START = 16


def shapes_for(option: str) -> tuple[SamplingShape, ...]:
    """Of a device's option `shapes`: "each", or "full" for the one that serves all."""
    return SAMPLING_SHAPES if option == "each" else SAMPLING_SHAPES[-1:]


def static_buckets(
    limits: BatchLimits,
    max_tokens: int,
    max_requests: int,
    sizes: Callable[[int, int], list[int]],
    shapes: Sequence[SamplingShape],
) -> tuple[Bucket, ...]:
    """Smallest first. sizes(first, last): sizes from the smallest to the largest that is needed."""
    rows = min(max_tokens, max_requests, limits.max_requests or max_requests)
    most = min(max_tokens, limits.max_tokens or max_tokens)
    found = [(tokens, 1, 0) for tokens in sizes(PREFILL_START, most)]
    found += [(count, count, 1) for count in sizes(1, rows)]
    return tuple(Bucket(*size, shape) for size in sorted(found) for shape in shapes)


def name_of(bucket: Bucket) -> str:
    """For people: "16 tokens, 1 requests, GREEDY"."""
    kind = ", one token each" if bucket.query == 1 else ""
    return f"{bucket.tokens or 'any'} tokens, {bucket.requests or 'any'} requests{kind}, {bucket.sampling.name}"
