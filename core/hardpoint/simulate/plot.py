"""The same charts as a PNG, by matplotlib, which is an optional extra."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hardpoint.errors import ConfigError
from hardpoint.simulate.summary import Series, Summary


def need_matplotlib() -> Any:
    """matplotlib's figure module. Raises ConfigError with the pip command where it is not installed."""
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"--plot draws with matplotlib, which cannot be imported: {error}",
            hint="pip install 'hardpoint[plot]'   (--html needs nothing)",
        ) from None


def draw(path: Path, title: str, summary: Summary, over_time: Series) -> None:
    """Write the PNG. Raises ConfigError without matplotlib, or where the file cannot be written."""
    figure = need_matplotlib().Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    figure.suptitle(title)
    shares = np.linspace(0.0, 1.0, 200)
    for axis, metric in zip(axes, ("ttft", "tpot", "latency"), strict=False):
        values = summary.samples(metric)
        if len(values):
            axis.plot(np.quantile(values, shares), shares)
        axis.set(title=f"{metric}, share of requests", xlabel="seconds", ylim=(0, 1.02))
    axes[3].plot(over_time.time, over_time.running, label="running")
    axes[3].plot(over_time.time, over_time.waiting, label="waiting")
    axes[3].legend()
    axes[3].set(title="requests", xlabel="seconds")
    axes[4].plot(over_time.time, over_time.token_rate)
    axes[4].set(title="tokens computed per second", xlabel="seconds")
    axes[5].plot(over_time.time, over_time.kv_use)
    axes[5].set(title="KV pages in use, share", xlabel="seconds")
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}") from None
