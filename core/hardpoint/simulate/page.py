"""The HTML report: one file that draws itself, with no script, font or picture from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from hardpoint.simulate.summary import Floats, Series, Summary, statistics

_STYLE = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#1d2126;--soft:#69727d;--line:#e3e5e8;--one:#1f6feb;--two:#c02b2b;--three:#1f8a4c}
@media (prefers-color-scheme:dark){:root{--bg:#14171a;--card:#1c2024;--ink:#e6e8ea;--soft:#97a1ab;--line:#30363d;
--one:#6aa5ff;--two:#ff8f8f;--three:#6fd197}}
*{box-sizing:border-box}
body{font:14px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1180px;padding:32px 20px 60px;color:var(--ink);
background:var(--bg)}
h1{font-size:28px;margin:0;letter-spacing:-.01em}h2{font-size:15px;margin:0 0 8px}p{color:var(--soft);margin:4px 0 18px}
code{font:12.5px/1.5 ui-monospace,monospace;display:block;overflow-wrap:anywhere;color:var(--ink);
background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px 12px;margin:14px 0 0}
.cards{display:grid;gap:16px;grid-template-columns:repeat(2,minmax(0,1fr))}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;overflow-x:auto}
.tall{grid-row:span 2}
table{border-collapse:collapse;width:100%}td,th{padding:4px 10px 4px 0;border-top:1px solid var(--line);text-align:left}
tr:first-child>*{border-top:0}.facts td:first-child{color:var(--soft);white-space:nowrap;vertical-align:top}
.numbers th,.numbers td{text-align:right;font-variant-numeric:tabular-nums}
.numbers th{color:var(--soft);font-weight:500}.numbers td:first-child{text-align:left}
svg{display:block;width:100%;height:auto}svg text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--line)}.line{fill:none;stroke-width:2;stroke-linejoin:round}
.one{stroke:var(--one)}.two{stroke:var(--two)}.three{stroke:var(--three)}
svg text.one{fill:var(--one)}svg text.two{fill:var(--two)}svg text.three{fill:var(--three)}svg text.one,svg text.two,
svg text.three{stroke:none;font-weight:600}
@media (max-width:820px){.cards{grid-template-columns:minmax(0,1fr)}h1{font-size:22px}svg text{font-size:14px}
.numbers{font-size:12px}.numbers td,.numbers th{padding:4px 0 4px 6px}.numbers td:first-child{padding-left:0}}
"""
_COLOURS = ("one", "two", "three")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 560, 240, 64, 32, 32, 14
#: Gaps between the marks of an axis, times a power of ten.
_GAPS = (1.0, 2.0, 2.5, 5.0, 10.0)

#: Name of a line, its x and its y values.
Line = tuple[str, Floats, Floats]


def report(title: str, command: str, summary: Summary, over_time: Series, facts: Sequence[tuple[str, str]]) -> str:
    """The whole page. facts: (name, value) rows of the first table."""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts)
    charts = "".join(
        f"<section><h2>{escape(name)}</h2>{chart}</section>" for name, chart in _charts(summary, over_time)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><code>{escape(command)}</code>"
        "<p>Simulated: the scheduler and the pager are the real ones, the device is a cost model.</p>"
        f'<div class="cards"><section class="tall"><h2>Deployment and traffic</h2><table class="facts">{rows}</table>'
        f"</section><section><h2>Latencies, ms</h2>{_latencies(summary)}</section>{charts}</div></body></html>\n"
    )


def _latencies(summary: Summary) -> str:
    head = ""
    body = ""
    for metric in ("ttft", "tpot", "latency"):
        found = statistics(summary, metric)
        head = "".join(f"<th>{name}</th>" for name in found)
        cells = "".join(f"<td>{_milliseconds(value)}</td>" for value in found.values())
        body += f"<tr><td>{metric}</td>{cells}</tr>"
    return f'<table class="numbers"><tr><th></th>{head}</tr>{body}</table>'


def _milliseconds(value: float | None) -> str:
    """Of seconds: a digit behind the point below a second."""
    return "-" if value is None else f"{1e3 * value:,.{int(value < 1)}f}"


def _charts(summary: Summary, over_time: Series) -> list[tuple[str, str]]:
    time = over_time.time
    requests = [("running", time, over_time.running), ("waiting", time, over_time.waiting)]
    return [
        ("Time to first token, share of requests", chart([_share("ttft", summary.ttft)], "ms", 1.0)),
        ("Time per output token, share of requests", chart([_share("tpot", summary.tpot)], "ms", 1.0)),
        ("Requests over time", chart(requests, "s")),
        ("Tokens computed per second", chart([("tokens/s", time, over_time.token_rate)], "s")),
        ("KV pages in use, share", chart([("in use", time, over_time.kv_use)], "s")),
    ]


def _share(name: str, values: Floats) -> Line:
    """The distribution function, in at most 200 points. values: seconds; its x are milliseconds."""
    if not len(values):
        return name, np.zeros(1), np.zeros(1)
    shares = np.linspace(0.0, 1.0, 200)
    return name, 1e3 * np.quantile(values, shares), shares


def chart(lines: Sequence[Line], x_unit: str, top: float | None = None) -> str:
    """Lines in one SVG, axes from 0. top: of the y axis; None takes the highest value."""
    across = marks(max(float(x.max()) for _, x, _ in lines))
    up = marks(max(float(y.max()) for _, _, y in lines) if top is None else top)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - _TOP
    parts = []
    for value in up:
        y = _TOP + high - high * value / up[-1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.10g}</text>')
    for value in across:
        x = _LEFT + wide * value / across[-1]
        unit = f" {x_unit}" if value == across[-1] else ""
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{value:,.10g}{unit}</text>')
    for number, (name, xs, ys) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{_LEFT + wide * x / across[-1]:.1f},{_TOP + high - high * y / up[-1]:.1f}"
            for x, y in zip(xs.tolist(), ys.tolist(), strict=True)
        )
        parts.append(f'<polyline class="line {colour}" points="{points}"/>')
        parts.append(f'<text class="{colour}" x="{_LEFT + 8}" y="{_TOP + 14 + 16 * number}">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def marks(highest: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `highest`, three to six gaps; 0 and 1 for nothing."""
    if highest <= 0.0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / 5.0))
    gap = next(power * gap for gap in _GAPS if power * gap * 5.0 >= highest * (1.0 - 1e-9))
    return [round(gap * count, 12) for count in range(math.ceil(highest / gap - 1e-9) + 1)]
