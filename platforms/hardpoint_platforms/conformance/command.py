"""The kit's command line: flags, the run, what is written. The core's `hardpoint conformance` leans on it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint_platforms.conformance.verdict import Report, Status, Verdict
from hardpoint_platforms.errors import HardpointError, PlatformError, PluginError

if TYPE_CHECKING:
    from hardpoint_platforms.conformance.subject import Subject

_HIGHEST = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags. Imports nothing heavy."""
    parser.add_argument("--device", required=True, metavar="NAME", help="platform to test: NAME or NAME:INDEX")
    parser.add_argument(
        "--level", type=int, default=_HIGHEST, choices=range(_HIGHEST + 1), metavar="N",
        help="highest level of the ladder to run, 0 to 6 (default: 6)",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report to look at")
    parser.add_argument("--json", action="store_true", help="every verdict, as JSON")
    parser.add_argument(
        "--case", action="append", default=[], metavar="ID", help="run this check alone; * and ? match; may be repeated"
    )
    parser.add_argument("--group", action="append", default=[], metavar="NAME", help="run this group alone")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="after which a check counts as hung")
    parser.add_argument(
        "--within", type=float, metavar="SECONDS", help="checks that have not begun by then are left unverified"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the plugin; may be repeated",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N",
        help="processes that share the device, for kernels that are compiled at first use (default: 1)",
    )  # fmt: skip
    parser.add_argument("--in-process", action="store_true", help="in this process, where a crash ends the run")
    parser.add_argument("--stream", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--faults", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="list the checks and run none")


def conduct_arguments(args: argparse.Namespace, groups: Iterable[Any], command: str) -> Report | list[str]:
    """The run that the flags ask for; the ids of the checks for --list. Raises PlatformError.

    `groups` are the caller's own, besides those of the kit. `command` is what people type; it starts other processes,
    too, as "python -m" or by its first word's module.
    """
    if not (args.in_process or args.list or args.stream is not None):
        return _supervised(args, command)
    from hardpoint_platforms.conformance.catalogue import all_groups
    from hardpoint_platforms.conformance.isolation import Part, last_words
    from hardpoint_platforms.conformance.runner import Run, Selection, conduct, stream

    cases, groups_asked, options = tuple(args.case), tuple(args.group), tuple(args.option)
    part = Part.of(args.part) if args.part else None
    selection = Selection(args.level, cases, groups_asked, args.seed, command, args.timeout, options, part, args.within)
    subject = _subject(args)
    every = all_groups(groups)
    if args.list:
        run = Run(subject, every, selection)
        try:
            return [check.id for check in run.checks()]
        finally:
            run.close()
    unknown = set(args.group) - {group.name for group in every} - {"quantized"}
    if unknown:
        names = ", ".join(group.name for group in every)
        raise PlatformError(f"--group {sorted(unknown)[0]}: there is no such group", hint=f"groups are {names}")
    if args.stream is not None:
        with last_words(args.faults) as arm:
            stream(subject, every, selection, args.stream, arm)
        return []
    report = conduct(subject, every, selection, _progress if sys.stderr.isatty() else None)
    return _not_empty(report)


def _supervised(args: argparse.Namespace, command: str) -> Report:
    from hardpoint_platforms.conformance.isolation import Supervisor

    words = command.removeprefix("python -m ").split()
    launch = [sys.executable, "-m", *words, "--device", args.device, "--level", str(args.level)]
    launch += ["--seed", str(args.seed)]
    for flag, given in (("--case", args.case), ("--group", args.group), ("--option", args.option)):
        for value in given:
            launch += [flag, value]
    if args.timeout is not None:
        launch += ["--timeout", str(args.timeout)]
    progress = _progress if sys.stderr.isatty() else None
    supervisor = Supervisor(launch, args.timeout, progress, max(args.jobs, 1), args.within)
    return _not_empty(supervisor.run(bool(args.case or args.group), args.level))


def _not_empty(report: Report) -> Report:
    if not report.verdicts:
        raise PlatformError("no check matches", hint="`--list` shows the ids that --case takes")
    return report


def _subject(args: argparse.Namespace) -> Subject:
    """The platform to test; a plugin that cannot be loaded is told with the line at which it fails."""
    from hardpoint_platforms.conformance import blame
    from hardpoint_platforms.conformance.subject import named

    try:
        return named(args.device, options_of(args.option))
    except PluginError as error:
        place = blame.of_error(error.__cause__, ()) if error.__cause__ is not None else ""
        if not place:
            raise
        raise PlatformError(f"{error.message}\n  at {place}", hint=error.hint) from error


def write(report: Report, args: argparse.Namespace, paint: Any = None) -> int:
    """Print the report, write the HTML file. Returns the exit code: 1 where a check failed."""
    if args.html is not None:
        from hardpoint_platforms.conformance.report_html import page

        args.html.parent.mkdir(parents=True, exist_ok=True)
        args.html.write_text(page(report), encoding="utf-8")
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        from hardpoint_platforms.conformance.report_text import plain, render

        print(render(report, paint or plain))
        if args.html is not None:
            print(f"report: {args.html}")
    return 1 if report.failures() else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0 passed, 1 failed, 2 no such device or a wrong flag."""
    command = "python -m hardpoint_platforms.conformance"
    parser = argparse.ArgumentParser(prog=command, description="Hold a platform against the SPI, level by level.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        outcome = conduct_arguments(args, (), command)
    except HardpointError as error:
        return refuse(error, args)
    if isinstance(outcome, list):
        sys.stdout.write("".join(f"{case}\n" for case in outcome))
        return 0
    return write(outcome, args)


def refuse(error: HardpointError, args: argparse.Namespace) -> int:
    """Say why nothing was run: to the parent if there is one, else on stderr."""
    if args.stream is not None:
        from hardpoint_platforms.conformance.isolation import emit

        emit(error=error.message, hint=error.hint)
    else:
        print(f"error: {error}", file=sys.stderr)
    return 2


def options_of(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE flags; values are JSON where they can be. Raises PlatformError for one without a key."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise PlatformError(f"--option {text!r} is not of the form KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def _progress(done: int, total: int, last: Verdict) -> None:
    mark = "" if last.status is not Status.FAIL else f"  fail {last.case}"
    print(f"\r\033[2K{done}/{total} {last.group}{mark}", end="" if not mark and done < total else "\n", file=sys.stderr)
