"""The table of `hardpoint bench kernels`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hardpoint.bench.kernels import KernelReport, OpRate

HEADERS = (
    "op",
    "calls",
    "provider",
    "tokens",
    "step",
    "time (us)",
    "GB/s",
    "of peak",
    "GMAC/s",
    "of peak",
    "bound",
)
#: Columns of numbers.
RIGHT = (1, 3, 5, 6, 7, 8, 9)
#: Below this share of both ceilings an op is shown as slow, if it takes at least _MATTERS of its step.
_SLOW = 0.5
_MATTERS = 0.03


def rows(report: KernelReport) -> list[tuple[str, ...]]:
    """Cells, a row per op and shape."""
    return [_row(rate) for rate in report.rates]


def styles(report: KernelReport) -> list[str | None]:
    """Per row: yellow for what is slow and matters, dim for what does not matter."""
    whole = dict(report.steps)
    found: list[str | None] = []
    for rate in report.rates:
        share = max(rate.memory_share or 0.0, rate.compute_share or 0.0)
        if rate.seconds * rate.calls < _MATTERS * whole[rate.shape]:
            found.append("dim")
        else:
            found.append("yellow" if rate.memory_share is not None and share < _SLOW else None)
    return found


def heading(report: KernelReport) -> str:
    """The device and its ceilings."""
    if report.ceilings is None:
        return f"{report.device}\nceilings: the device measures none"
    rates = report.ceilings.multiply_adds_per_second
    products = ", ".join(f"{kind} {rate / 1e9:,.1f} GMAC/s" for kind, rate in rates.items())
    return f"{report.device}\nceilings: memory {report.ceilings.bytes_per_second / 1e9:,.1f} GB/s, {products}"


def footing(report: KernelReport) -> str:
    """Seconds of all ops per shape of step, and what was left out."""
    lines = ["all ops of a step, ms: " + ", ".join(f"{shape}: {1e3 * took:.2f}" for shape, took in report.steps)]
    lines.append('a step "N x C" decodes N requests behind C cached tokens; "prompt N" is one prompt')
    lines.append("of peak: of the ceiling; above 100% where the data came from a cache")
    lines += [f"left out: {reason}" for reason in report.skipped]
    return "\n".join(lines)


def as_json(report: KernelReport) -> dict[str, Any]:
    """Plain data, SI units."""
    ceilings = report.ceilings
    return {
        "device": report.device,
        "ceilings": None
        if ceilings is None
        else {
            "bytes_per_second": ceilings.bytes_per_second,
            "multiply_adds_per_second": dict(ceilings.multiply_adds_per_second),
        },
        "ops": [dataclasses.asdict(rate) | {"bound": rate.bound} for rate in report.rates],
        "steps": [{"shape": shape, "seconds": took} for shape, took in report.steps],
        "skipped": list(report.skipped),
    }


def _row(rate: OpRate) -> tuple[str, ...]:
    products = rate.multiply_adds or None
    return (
        rate.name,
        str(rate.calls),
        rate.provider,
        str(rate.tokens),
        rate.shape,
        f"{1e6 * rate.seconds:,.1f}",
        "-" if rate.bytes is None else f"{rate.bytes / rate.seconds / 1e9:.2f}",
        _percent(rate.memory_share),
        "-" if products is None else f"{products / rate.seconds / 1e9:.2f}",
        _percent(rate.compute_share),
        _bound(rate),
    )


def _bound(rate: OpRate) -> str:
    names: Sequence[str | None] = (rate.bound, rate.kind if rate.bound == "compute" else None)
    return " ".join(filter(None, names)) or "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
