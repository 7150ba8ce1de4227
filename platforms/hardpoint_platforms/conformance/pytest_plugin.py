"""The kit under pytest: `pytest --hardpoint-device NAME` adds every check as a test, and the level to the summary.

    pytest --hardpoint-device acme                         the plugin's own tests, and the kit
    pytest --hardpoint-device acme -k conformance          the kit alone
    pytest --hardpoint-device acme --hardpoint-level 2     up to L2

Nothing heavy is imported unless a device is named, because pytest loads this module in every run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint_platforms.conformance.verdict import Report, Status, Verdict

if TYPE_CHECKING:
    from hardpoint_platforms.conformance.checks import Check
    from hardpoint_platforms.conformance.runner import Run

_KEY = pytest.StashKey["KitSession"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the flags."""
    group = parser.getgroup("hardpoint", "conformance of a device plugin")
    group.addoption("--hardpoint-device", metavar="NAME", help="platform to hold against the SPI: NAME or NAME:INDEX")
    group.addoption("--hardpoint-level", type=int, default=6, metavar="N", help="highest level to run, 0 to 6")
    group.addoption("--hardpoint-seed", type=int, default=0, metavar="N", help="of everything random")
    group.addoption("--hardpoint-html", type=Path, metavar="FILE", help="write a report to look at")
    group.addoption("--hardpoint-timeout", type=float, metavar="SECONDS", help="after which a check counts as hung")
    group.addoption("--hardpoint-option", action="append", default=[], metavar="KEY=VALUE", help="option of the plugin")


class CheckFailed(Exception):
    """A verdict that failed, as pytest shows it."""

    def __init__(self, verdict: Verdict) -> None:
        lines = [verdict.message, *([f"at {verdict.blame}"] if verdict.blame else []), f"repeat: {verdict.repeat}"]
        super().__init__("\n".join(lines))


class CheckItem(pytest.Item):
    """One check as a test. Refused and unverified ones are skipped with their reason."""

    def __init__(self, *, check: Check, kit: KitSession, **more: Any) -> None:
        super().__init__(**more)
        self._check, self._kit = check, kit

    def runtest(self) -> None:
        verdict = self._kit.judge(self._check)
        if verdict.status is Status.FAIL:
            raise CheckFailed(verdict)
        if verdict.status is not Status.PASS:
            pytest.skip(f"{verdict.status.value}: {verdict.message}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The verdict's own words instead of the kit's traceback."""
        if isinstance(excinfo.value, CheckFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class KitSession:
    """The run behind the items of one pytest session."""

    def __init__(self, run: Run, level: int) -> None:
        self.run, self.level = run, level
        self.total = 0
        self._verdicts: list[Verdict] = []
        self._started = time.perf_counter()

    def judge(self, check: Check) -> Verdict:
        """Run a check and keep its verdict."""
        verdict = self.run.verdict(check)
        self._verdicts.append(verdict)
        return verdict

    def report(self) -> Report | None:
        """What the verdicts add up to; without a level where some checks were deselected. None where none ran."""
        if not self._verdicts:
            return None
        report = self.run.report(self._verdicts, time.perf_counter() - self._started)
        if len(self._verdicts) == self.total:
            return report
        from dataclasses import replace

        advice = "run every check to see the level"
        return replace(report, partial=True, reached=None, next_step=advice)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the kit's checks behind the tests that were found. -k and -m choose among them as usual."""
    device = config.getoption("--hardpoint-device")
    if not device:
        return
    from hardpoint_platforms.conformance.catalogue import all_groups
    from hardpoint_platforms.conformance.command import options_of
    from hardpoint_platforms.conformance.runner import Run, Selection
    from hardpoint_platforms.conformance.subject import named
    from hardpoint_platforms.errors import HardpointError

    level = config.getoption("--hardpoint-level")
    selection = Selection(
        level=level,
        seed=config.getoption("--hardpoint-seed"),
        command="python -m hardpoint_platforms.conformance",
        patience=config.getoption("--hardpoint-timeout"),
    )
    try:
        subject = named(device, options_of(config.getoption("--hardpoint-option")))
    except HardpointError as error:
        raise pytest.UsageError(f"--hardpoint-device {device}: {error}") from error
    kit = KitSession(Run(subject, all_groups(), selection), level)
    config.stash[_KEY] = kit
    for check in kit.run.checks():
        kit.total += 1
        items.append(CheckItem.from_parent(session, name=f"conformance::{check.id}", check=check, kit=kit))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The level reached and the next step; the HTML file."""
    kit = config.stash.get(_KEY, None)
    report = kit.report() if kit is not None else None
    if report is None:
        return
    from hardpoint_platforms.conformance.report_text import render

    terminalreporter.section(f"hardpoint conformance of {report.device}")
    terminalreporter.write_line(render(report))
    target = config.getoption("--hardpoint-html")
    if target is not None:
        from hardpoint_platforms.conformance.report_html import page

        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(report), encoding="utf-8")
        terminalreporter.write_line(f"report: {target}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the device."""
    kit = config.stash.get(_KEY, None)
    if kit is not None:
        kit.run.close()
