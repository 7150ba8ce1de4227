"""The same charts as a PNG, by matplotlib, which is an optional extra."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hardpoint.charts import figure, save
from hardpoint.simulate.summary import Series, Summary


def draw(path: Path, title: str, summary: Summary, over_time: Series) -> None:
    """Write the PNG. Raises ConfigError without matplotlib, or where the file cannot be written."""
    drawn = figure(12, 7)
    axes = drawn.subplots(2, 3).flatten()
    drawn.suptitle(title)
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
    save(drawn, path)
