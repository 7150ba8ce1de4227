"""A report to look at: one file, no script, no outside resource, light and dark.

On top the level reached as a ladder, then failures with their commands, then per group a matrix of contracts against
dtypes and phases: colour is the verdict, the bar the share of the tolerance used, the number the speed against the
reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from hardpoint_platforms.conformance.ladder import LEVELS
from hardpoint_platforms.conformance.style import STYLE
from hardpoint_platforms.conformance.verdict import Report, Status, Verdict, counts

_ORDER = (Status.FAIL, Status.PASS, Status.REFUSED, Status.UNVERIFIED)
#: Columns of phases in this order; others behind them.
_PHASES = ("", "prefill", "chunked", "decode", "mixed", "verify")
_LEGEND = (
    '<p class="legend">A cell: checks that pass of all; colour: the verdict; small number: speed against the reference '
    "on the kit's small samples; bar: share of the tolerance used. Point at a cell to read more.</p>"
)


def page(report: Report) -> str:
    """The whole document."""
    title = f"{report.device} conformance"
    groups = list(dict.fromkeys(verdict.group for verdict in report.verdicts))
    body = [
        _header(report),
        _ladder(report),
        _failures(report.failures()),
        _LEGEND,
        *(_group(name, [v for v in report.verdicts if v.group == name]) for name in groups),
        _footer(report),
    ]
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _header(report: Report) -> str:
    number = counts(report.verdicts)
    tiles = "".join(
        f'<div class="tile {status.value}"><b>{number[status.value]}</b><span>{status.value}</span></div>'
        for status in Status
    )
    return (
        f"<header><div><h1>{escape(report.device)}</h1>"
        f"<p>{escape(report.name)}<br>{escape(report.distribution)} {escape(report.version)}</p></div>"
        f'<div class="tiles">{tiles}</div></header>'
    )


def _ladder(report: Report) -> str:
    rungs = []
    for level in LEVELS:
        if report.reached is None or level.number > report.asked:
            kind, told = "open", "not run"
        elif level.number <= report.reached:
            kind, told = "pass", "reached"
        elif level.number == report.reached + 1:
            kind, told = "fail" if _failed(report, level.number) else "refused", "next"
        else:
            kind, told = "open", "above"
        rungs.append(
            f'<li class="{kind}" title="{escape(level.works)}"><b>L{level.number}</b>'
            f"<span>{escape(level.title)}</span><i>{told}</i></li>"
        )
    return f'<ol class="ladder">{"".join(rungs)}</ol><p class="next"><b>Next</b> {escape(report.next_step)}</p>'


def _failed(report: Report, level: int) -> bool:
    return any(verdict.level == level for verdict in report.failures())


def _failures(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    rows = "".join(
        f"<details{' open' if place < 3 else ''}><summary>{escape(verdict.case)}</summary>"
        f"<p>{escape(verdict.message)}</p>"
        + (f"<p>at <code>{escape(verdict.blame)}</code></p>" if verdict.blame else "")
        + f"<pre>{escape(verdict.repeat)}</pre></details>"
        for place, verdict in enumerate(verdicts)
    )
    return f'<section class="failures"><h2>{len(verdicts)} failed</h2>{rows}</section>'


def _group(name: str, verdicts: Sequence[Verdict]) -> str:
    columns = _columns(verdicts)
    contracts = list(dict.fromkeys(verdict.contract for verdict in verdicts))
    rows = []
    for contract in contracts:
        mine = [verdict for verdict in verdicts if verdict.contract == contract]
        cells = "".join(_cell([v for v in mine if (v.dtype, v.phase) == column]) for column in columns)
        rows.append(f'<tr><th scope="row">{escape(contract)}<small>L{mine[0].level}</small></th>{cells}</tr>')
    return (
        f"<section><h2>{escape(name)}</h2>"
        f'<div class="scroll"><table class="matrix">{_heads(columns)}<tbody>{"".join(rows)}</tbody></table></div>'
        f"<details><summary>all {len(verdicts)} checks</summary>{_list(verdicts)}</details></section>"
    )


def _columns(verdicts: Iterable[Verdict]) -> list[tuple[str, str]]:
    """(dtype, phase) pairs that occur, dtypes in the order of the run."""
    found = dict.fromkeys((verdict.dtype, verdict.phase) for verdict in verdicts)
    dtypes = list(dict.fromkeys(dtype for dtype, _ in found))

    def place(column: tuple[str, str]) -> tuple[int, int]:
        phase = column[1]
        return dtypes.index(column[0]), _PHASES.index(phase) if phase in _PHASES else len(_PHASES)

    return sorted(found, key=place)


def _heads(columns: Sequence[tuple[str, str]]) -> str:
    """A row of dtypes and one of phases, where there are any."""
    dtypes = dict.fromkeys(dtype for dtype, _ in columns)
    first = "".join(
        f'<th colspan="{sum(1 for d, _ in columns if d == dtype)}">{escape(dtype) or "any"}</th>' for dtype in dtypes
    )
    second = "".join(f"<th>{escape(phase) or 'all'}</th>" for _, phase in columns)
    rows = [first if any(dtypes) else "", second if any(phase for _, phase in columns) else ""]
    return f"<thead>{''.join(f'<tr><th></th>{row}</tr>' for row in rows if row)}</thead>"


def _cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return '<td class="none"></td>'
    found = {verdict.status for verdict in verdicts}
    status = next(status for status in _ORDER if status in found)
    passed = sum(verdict.status is Status.PASS for verdict in verdicts)
    speed, share = speed_of(verdicts), share_of(verdicts)
    told = f"{passed} of {len(verdicts)} pass"
    if share is not None:
        told += f", {share:.0%} of the tolerance"
    message = next((v.message for v in verdicts if v.status is status and v.message), "")
    bar = f'<s style="width:{min(1.0, share or 0.0):.0%}"></s>' if share is not None else ""
    number = f"<small>{speed:.2f}x</small>" if speed is not None else ""
    title = escape(f"{told}. {message}".strip(". "), quote=True)
    return f'<td class="{status.value}" title="{title}"><b>{passed}/{len(verdicts)}</b>{number}{bar}</td>'


def speed_of(verdicts: Iterable[Verdict]) -> float | None:
    """The reference's seconds over ours, summed; None where nothing was timed."""
    timed = [(v.seconds, v.reference_seconds) for v in verdicts if v.seconds and v.reference_seconds]
    ours = sum(seconds for seconds, _ in timed)
    return sum(seconds for _, seconds in timed) / ours if ours else None


def share_of(verdicts: Iterable[Verdict]) -> float | None:
    """The worst share of a tolerance that was used; None where nothing was compared."""
    shares = [ratio for verdict in verdicts if (ratio := verdict.ratio) is not None]
    return max(shares, default=None)


def _list(verdicts: Sequence[Verdict]) -> str:
    rows = "".join(
        f'<tr><td class="{v.status.value}">{v.status.value}</td><td>{escape(v.case)}</td>'
        f"<td>{'' if v.error is None else f'{v.error:.2g}'}</td>"
        f"<td>{'' if v.tolerance is None else f'{v.tolerance:.2g}'}</td>"
        f"<td>{_microseconds(v.seconds)}</td><td>{_microseconds(v.reference_seconds)}</td>"
        f"<td>{escape(v.message[:200])}</td></tr>"
        for v in verdicts
    )
    heads = "".join(
        f"<th>{head}</th>" for head in ("", "check", "error", "allowed", "&micro;s", "reference &micro;s", "")
    )
    return f'<div class="scroll"><table class="list"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.0f}"


def _footer(report: Report) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    run = f"{len(report.verdicts)} checks in {report.seconds:.1f} s, seed {report.seed}"
    return f"<footer>{run}; {escape(facts)}.</footer>"
