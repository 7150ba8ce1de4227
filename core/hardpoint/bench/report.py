"""From request records to numbers: latencies with percentiles, throughput, a histogram in text.

TTFT   time to first token: from sending to the first piece of the stream
TPOT   time per output token after the first: (last - first) / (tokens - 1), one value per request
ITL    inter-token latency: distances between pieces of the stream, many values per request
E2E    from sending to the end
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.bench.load import Record

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Distribution:
    """Seconds of one metric: mean, standard deviation, extremes, and the percentiles of PERCENTILES."""

    count: int
    mean: float
    deviation: float
    lowest: float
    highest: float
    percentiles: tuple[float, ...]

    @property
    def median(self) -> float:
        """The 50th percentile."""
        return self.percentiles[0]


@dataclass(frozen=True)
class Summary:
    """One run.

    Attributes:
        requests, failed: all, and those with an error.
        duration: seconds from the first request to the last end.
        prompt_tokens, output_tokens: of the good requests.
        request_rate: good requests per second; output_rate, total_rate: tokens per second.
        ttft, tpot, itl, e2e: None where no request gave a value.
        errors: (text, count), most frequent first.
    """

    requests: int
    failed: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    request_rate: float
    output_rate: float
    total_rate: float
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    errors: tuple[tuple[str, int], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data; distributions with named percentiles."""
        plain = dataclasses.asdict(self)
        for name in ("ttft", "tpot", "itl", "e2e"):
            values = plain[name]
            if values is not None:
                values |= {f"p{p}": value for p, value in zip(PERCENTILES, values.pop("percentiles"), strict=True)}
        return plain


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the neighbours of rank share/100 * (n - 1), as numpy does. `ordered` ascends."""
    rank = (len(ordered) - 1) * share / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Sequence[float]) -> Distribution | None:
    """Of any number of values; None for none."""
    if not values:
        return None
    ordered = sorted(values)
    return Distribution(
        count=len(ordered),
        mean=statistics.fmean(ordered),
        deviation=statistics.pstdev(ordered),
        lowest=ordered[0],
        highest=ordered[-1],
        percentiles=tuple(percentile(ordered, share) for share in PERCENTILES),
    )


def summarize(records: Sequence[Record]) -> Summary:
    """All records of one run; failed ones count in `failed` and `errors` alone."""
    good = [record for record in records if record.error is None]
    failed = Counter(record.error for record in records if record.error is not None)
    duration = max((r.end for r in records), default=0.0) - min((r.start for r in records), default=0.0)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    rate = 1 / duration if duration > 0 else 0.0
    return Summary(
        requests=len(records),
        failed=len(records) - len(good),
        duration=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        request_rate=len(good) * rate,
        output_rate=output_tokens * rate,
        total_rate=(prompt_tokens + output_tokens) * rate,
        ttft=distribution([r.events[0] - r.start for r in good if r.events]),
        tpot=distribution(
            [(r.events[-1] - r.events[0]) / (r.output_tokens - 1) for r in good if r.events and r.output_tokens > 1]
        ),
        itl=distribution([b - a for r in good for a, b in zip(r.events, r.events[1:], strict=False)]),
        e2e=distribution([r.end - r.start for r in good]),
        errors=tuple(failed.most_common()),
    )


def report(summary: Summary) -> str:
    """The run as text for people."""
    lines = [
        f"requests    {summary.requests - summary.failed} done, {summary.failed} failed, in {summary.duration:.2f} s",
        f"tokens      {summary.prompt_tokens:,} in, {summary.output_tokens:,} out",
        f"throughput  {summary.output_rate:,.1f} output tok/s, {summary.total_rate:,.1f} tok/s in all, "
        f"{summary.request_rate:.2f} requests/s",
        "",
        f"{'ms':<6}{'mean':>10}{'std':>10}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES) + f"{'max':>10}",
    ]
    for name in ("ttft", "tpot", "itl", "e2e"):
        values: Distribution | None = getattr(summary, name)
        if values is None:
            lines.append(f"{name.upper():<6}{'-':>10}")
            continue
        cells = (values.mean, values.deviation, *values.percentiles, values.highest)
        lines.append(f"{name.upper():<6}" + "".join(f"{1e3 * cell:>10.2f}" for cell in cells))
    lines += [f"failed x{count}: {text}" for text, count in summary.errors]
    return "\n".join(lines)


def histogram(values: Sequence[float], *, title: str, bins: int = 10, width: int = 40) -> str:
    """Seconds as horizontal bars, one line per bin."""
    if not values:
        return f"{title}: no values"
    low, high = min(values), max(values)
    step = (high - low) / bins or 1e-9
    counts = Counter(min(int((value - low) / step), bins - 1) for value in values)
    most = max(counts.values())
    lines = [f"{title} (ms)"]
    for index in range(bins):
        bar = "#" * math.ceil(width * counts[index] / most)
        lines.append(f"{1e3 * (low + index * step):>10.1f} {bar:<{width}} {counts[index]}")
    return "\n".join(lines)
