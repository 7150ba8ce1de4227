"""A report for the terminal: level, a table per group, failures with the commands that repeat them, the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hardpoint_platforms.conformance.ladder import LEVELS
from hardpoint_platforms.conformance.verdict import Report, Status, Verdict, counts

#: paint(text, style), styles: green, red, yellow, dim, bold.
Paint = Callable[[str, str], str]

_STYLES = {Status.PASS: "green", Status.FAIL: "red", Status.REFUSED: "yellow", Status.UNVERIFIED: "dim"}
#: Failures that are shown in full; a broken kernel fails in hundreds of cases.
MOST_FAILURES = 20


def plain(text: str, style: str) -> str:
    """No colours."""
    return text


def render(report: Report, paint: Paint = plain) -> str:
    """The whole report."""
    lines = [_headline(report, paint), ""]
    for group in dict.fromkeys(verdict.group for verdict in report.verdicts):
        lines += [*_table(group, [v for v in report.verdicts if v.group == group], paint), ""]
    failures = report.failures()
    if failures:
        lines.append(paint(f"{len(failures)} failed", "red"))
        for verdict in failures[:MOST_FAILURES]:
            lines += _failure(verdict, paint)
        if len(failures) > MOST_FAILURES:
            lines.append(f"  and {len(failures) - MOST_FAILURES} more: --json shows all")
        lines.append("")
    lines.append(f"{paint('next:', 'bold')} {report.next_step}")
    return "\n".join(lines)


def _headline(report: Report, paint: Paint) -> str:
    told = f"{report.device} ({report.name}; {report.distribution} {report.version})"
    number = counts(report.verdicts)
    summary = ", ".join(f"{count} {name}" for name, count in number.items() if count) or "nothing was run"
    if report.reached is None:
        level = "level: not judged, a part of the checks was run"
    elif report.reached < 0:
        level = paint("level: none yet", "red")
    else:
        rung = LEVELS[report.reached]
        level = paint(f"level: L{rung.number} {rung.title}", "green") + f" ({rung.works})"
    return f"{told}\n{level}\n{summary}, in {report.seconds:.1f} s, seed {report.seed}"


def _table(group: str, verdicts: Sequence[Verdict], paint: Paint) -> list[str]:
    """One line per contract: counts, worst share of the tolerance, time against the reference."""
    lines = [paint(group, "bold")]
    rows = {v.contract: [w for w in verdicts if w.contract == v.contract] for v in verdicts}
    width = max(len(contract) for contract in rows)
    for contract, mine in rows.items():
        worst = _worst(mine)
        number = counts(mine)
        told = " ".join(f"{count} {name}" for name, count in number.items() if count)
        share = _share([v for v in mine if v.status is Status.PASS])
        line = f"  {paint(f'{worst.value:<10}', _STYLES[worst])} L{mine[0].level} {contract:<{width}}  {told}{share}"
        if worst in (Status.REFUSED, Status.UNVERIFIED) and number[Status.PASS.value] == 0:
            line += f"  ({mine[0].message})"
        lines.append(line)
    return lines


def _worst(verdicts: Sequence[Verdict]) -> Status:
    """Fail before pass before what was not run."""
    found = {verdict.status for verdict in verdicts}
    return next(s for s in (Status.FAIL, Status.PASS, Status.REFUSED, Status.UNVERIFIED) if s in found)


def _share(verdicts: Sequence[Verdict]) -> str:
    told = ""
    ratios = [ratio for v in verdicts if (ratio := v.ratio) is not None]
    if ratios:
        worst = max(verdicts, key=lambda v: v.ratio or 0.0)
        told += f"  worst error {worst.error:.2g}, {100 * max(ratios):.0f}% of what is allowed"
    ours = sum(v.seconds for v in verdicts if v.seconds and v.reference_seconds)
    theirs = sum(v.reference_seconds for v in verdicts if v.seconds and v.reference_seconds)
    return told + (f"  {theirs / ours:.1f} x the reference's speed" if ours else "")


def _failure(verdict: Verdict, paint: Paint) -> list[str]:
    where = " ".join(filter(None, (verdict.dtype, verdict.phase)))
    lines = [f"  {paint('fail', 'red')} {verdict.case}" + (f" ({where})" if where else "")]
    lines.append(f"       {verdict.message}")
    if verdict.blame:
        lines.append(f"       at {verdict.blame}")
    lines.append(f"       repeat: {verdict.repeat}")
    return lines
