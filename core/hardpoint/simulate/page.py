"""The HTML report: one file that draws itself, with no script, font or picture from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from hardpoint.simulate.summary import Floats, Series, Summary, statistics

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#222}"
    "h1{font-size:1.4rem}h2{font-size:1.05rem;margin:1.5rem 0 .3rem}table{border-collapse:collapse;margin:.5rem 0}"
    "td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
    "code{background:#f3f3f3;padding:.1rem .3rem}.charts{display:grid;"
    "grid-template-columns:repeat(auto-fit,minmax(28rem,1fr))"
    ";gap:1rem}svg{width:100%;height:auto;background:#fafafa;"
    "border:1px solid #e5e5e5}svg text{font-size:11px;fill:#555}"
)
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 240, 56, 32, 12

#: Name of a line, its x and its y values.
Line = tuple[str, Floats, Floats]


def report(title: str, command: str, summary: Summary, over_time: Series, facts: Sequence[tuple[str, str]]) -> str:
    """The whole page. facts: (name, value) rows of the first table."""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts)
    charts = "".join(f"<div><h2>{escape(name)}</h2>{chart}</div>" for name, chart in _charts(summary, over_time))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p><code>{escape(command)}</code></p>"
        f"<p>Simulated: the scheduler and the pager are the real ones, the device is a cost model.</p>"
        f"<table>{rows}</table>{_latencies(summary)}<div class='charts'>{charts}</div></body></html>\n"
    )


def _latencies(summary: Summary) -> str:
    head = ""
    body = ""
    for metric in ("ttft", "tpot", "latency"):
        found = statistics(summary, metric)
        head = "".join(f"<th>{name}</th>" for name in found)
        cells = "".join(f"<td>{'-' if value is None else f'{1e3 * value:,.1f}'}</td>" for value in found.values())
        body += f"<tr><td>{metric}, ms</td>{cells}</tr>"
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _charts(summary: Summary, over_time: Series) -> list[tuple[str, str]]:
    time = over_time.time
    return [
        ("Time to first token, share of requests", chart([_share("ttft", summary.ttft)], "s", "")),
        ("Time per output token, share of requests", chart([_share("tpot", summary.tpot)], "s", "")),
        (
            "Requests over time",
            chart([("running", time, over_time.running), ("waiting", time, over_time.waiting)], "s", ""),
        ),
        ("Tokens computed per second", chart([("tokens/s", time, over_time.token_rate)], "s", "")),
        ("KV pages in use, share", chart([("in use", time, over_time.kv_use)], "s", "")),
    ]


def _share(name: str, values: Floats) -> Line:
    """The distribution function, in at most 200 points."""
    if not len(values):
        return name, np.zeros(1), np.zeros(1)
    shares = np.linspace(0.0, 1.0, 200)
    return name, np.quantile(values, shares), shares


def chart(lines: Sequence[Line], x_unit: str, y_unit: str) -> str:
    """Lines in one SVG, axes from 0."""
    right = max(float(x.max()) for _, x, _ in lines) or 1.0
    top = max(float(y.max()) for _, _, y in lines) or 1.0
    wide, high = _WIDTH - _LEFT - 12, _HEIGHT - _BOTTOM - _TOP
    parts = []
    for step in range(5):
        y = _TOP + high - high * step / 4
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(top * step / 4)}{y_unit}</text>')
        x = _LEFT + wide * step / 4
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{_tick(right * step / 4)} {x_unit}</text>'
        )
    for number, (name, xs, ys) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{_LEFT + wide * x / right:.1f},{_TOP + high - high * y / top:.1f}"
            for x, y in zip(xs.tolist(), ys.tolist(), strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{_LEFT + 8}" y="{_TOP + 12 + 14 * number}" style="fill:{colour}">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
