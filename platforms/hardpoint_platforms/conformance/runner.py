"""Runs checks on a device and keeps their verdicts. Whatever the plugin does becomes a verdict."""

from __future__ import annotations

import fnmatch
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from hardpoint_platforms.conformance import blame, isolation
from hardpoint_platforms.conformance.checks import PATIENCE, Check, Group, Measure, Refused, Unverified, Wrong
from hardpoint_platforms.conformance.ladder import HIGHEST, reached
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.conformance.verdict import Report, Status, Verdict
from hardpoint_platforms.conformance.watchdog import Hung, Watchdog
from hardpoint_platforms.discovery import stdout_to_stderr
from hardpoint_platforms.errors import DeviceUnavailable, HardpointError, UnsupportedOperation
from hardpoint_platforms.ops.samples import varied

#: After so many hangs the rest is left unverified: each costs a thread that never ends.
MOST_HANGS = 3
_SETUP = "setup"


@dataclass(frozen=True)
class Selection:
    """Which checks run.

    Attributes:
        level: the highest level; cases: patterns of ids, empty for all; groups: names, empty for all.
        seed: of the run; command: what `repeat` commands start with; patience: seconds per check, None for the check's.
        options: of the plugin, KEY=VALUE as given, for `repeat` commands.
        part: the share of the checks that is run here, None for all.
        within: seconds after which no more checks begin, None for any time.
    """

    level: int = HIGHEST
    cases: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    seed: int = 0
    command: str = "hardpoint conformance"
    patience: float | None = None
    options: tuple[str, ...] = ()
    part: isolation.Part | None = None
    within: float | None = None

    @property
    def partial(self) -> bool:
        """Whether checks up to the level are left out."""
        return bool(self.cases or self.groups)

    def wants(self, check: Check) -> bool:
        """Whether a check is to run."""
        if check.level > self.level or (self.groups and check.group not in self.groups):
            return False
        return not self.cases or any(fnmatch.fnmatchcase(check.id, case) for case in self.cases)


class Run:
    """One run over one device: makes checks, runs them one by one. Close it."""

    def __init__(self, subject: Subject, groups: Sequence[Group], selection: Selection) -> None:
        self.subject = subject
        self.selection = selection
        self._groups = groups
        self._watchdog = Watchdog(subject.folders)
        self._hangs = 0
        self._ends = None if selection.within is None else time.monotonic() + selection.within

    def checks(self) -> Iterable[Check]:
        """The selected checks of every group. A group that cannot make its checks yields one that tells why."""
        for group in self._groups:
            if self._hangs >= MOST_HANGS:
                return
            try:
                made = self._guarded(
                    partial(_made, group, self.subject, self.selection.seed), self.selection.patience or 2 * PATIENCE
                )
            except BaseException as error:
                if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
                    raise
                self._hangs += isinstance(error, Hung)
                made = [Check(group.name, _SETUP, "making the checks", 0, _raiser(error))]
            yield from (replace(check, beside=group.beside) for check in made if self.selection.wants(check))

    def verdict(self, check: Check) -> Verdict:
        """Run one check. Never raises for what the plugin does."""
        if self._hangs >= MOST_HANGS and check.contract != _SETUP:
            told = f"not run: {MOST_HANGS} checks hung before it"
            return self._judged(check, Status.UNVERIFIED, told)
        if self._ends is not None and time.monotonic() > self._ends:
            return self._judged(check, Status.UNVERIFIED, "not run: the time of --within was over")
        seed = check.seed(self.selection.seed)
        patience = self.selection.patience or check.patience
        try:
            measure: Measure = self._guarded(lambda: check.body(self.subject, seed), patience)
        except Hung as hung:
            self._hangs += 1
            self.subject.forget()
            return self._judged(check, Status.FAIL, self._names(check, f"hangs: {hung}"), blame=hung.place)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except Wrong as wrong:
            place = wrong.place or (blame.of_code(wrong.subject_code) if wrong.subject_code is not None else "")
            return self._judged(
                check,
                Status.FAIL,
                self._names(check, str(wrong)),
                blame=place or blame.of_error(wrong, self.subject.folders),
                error=wrong.error,
                tolerance=wrong.tolerance,
            )
        except (Refused, UnsupportedOperation) as refused:
            return self._judged(check, Status.REFUSED, _message(refused) or "no reason given")
        except Unverified as unverified:
            return self._judged(check, Status.UNVERIFIED, str(unverified))
        except BaseException as error:
            told = self._names(check, f"{type(error).__name__}: {_message(error)}")
            return self._judged(check, Status.FAIL, told, blame=blame.of_error(error, self.subject.folders))
        return self._judged(
            check,
            Status.PASS,
            measure.message,
            error=measure.error,
            tolerance=measure.tolerance,
            seconds=measure.seconds,
            reference_seconds=measure.reference_seconds,
        )

    def named(self, check: Check) -> Verdict:
        """What a check's verdict is called, before it is known."""
        return self._judged(check, Status.UNVERIFIED, "")

    def close(self) -> None:
        """Close the device; what it raises then is dropped, the checks of `load` have closed one before."""
        try:
            self._guarded(self.subject.close, PATIENCE)
        except (Exception, Hung):
            self.subject.forget()
        self._watchdog.close()

    def report(self, verdicts: Sequence[Verdict], seconds: float) -> Report:
        """What the verdicts add up to."""
        subject, selection = self.subject, self.selection
        level, advice = (None, "run without --case and --group to see the level")
        if not selection.partial:
            level, advice = reached(verdicts, selection.level)
        try:
            name = self._guarded(lambda: subject.device.info.name, selection.patience or PATIENCE)
        except (Exception, Hung) as error:
            name = f"(cannot be opened: {type(error).__name__})"
        entry = subject.entry
        return Report(
            device=f"{entry.name}:{subject.index}",
            name=name,
            distribution=entry.distribution,
            version=entry.version,
            seed=selection.seed,
            asked=selection.level,
            partial=selection.partial,
            reached=level,
            next_step=advice,
            verdicts=tuple(verdicts),
            seconds=seconds,
            machine=machine(),
        )

    def _guarded(self, work: Callable[[], Any], patience: float) -> Any:
        with stdout_to_stderr():
            return self._watchdog.run(work, patience)

    def _names(self, check: Check, told: str) -> str:
        entry = self.subject.entry
        return f"{entry.distribution} {entry.version}: {check.contract} {told}"

    def _judged(self, check: Check, status: Status, message: str, **more: Any) -> Verdict:
        seed = self.selection.seed
        words = [self.selection.command, "--device", shlex.quote(self.subject.request), "--case", shlex.quote(check.id)]
        if seed:
            words += ["--seed", str(seed)]
        for option in self.selection.options:
            words += ["--option", shlex.quote(option)]
        return Verdict(
            case=check.id,
            group=check.group,
            contract=check.contract,
            level=check.level,
            status=status,
            dtype=check.dtype,
            phase=check.phase,
            message=message,
            seed=seed,
            repeat=" ".join(words),
            required=check.required,
            **more,
        )


def conduct(
    subject: Subject,
    groups: Sequence[Group],
    selection: Selection,
    progress: Callable[[int, int, Verdict], None] | None = None,
) -> Report:
    """Run everything selected. `progress` gets (done, of, the last verdict)."""
    started = time.perf_counter()
    run = Run(subject, groups, selection)
    try:
        checks = list(run.checks())
        verdicts = []
        for done, check in enumerate(checks, 1):
            verdicts.append(run.verdict(check))
            if progress is not None:
                progress(done, len(checks), verdicts[-1])
        return run.report(verdicts, time.perf_counter() - started)
    finally:
        run.close()


def stream(
    subject: Subject, groups: Sequence[Group], selection: Selection, skip: int, arm: Callable[[float], None]
) -> None:
    """The child's side of `isolation`: one line per event, from the check `skip` of its part on."""
    run = Run(subject, groups, selection)
    try:
        checks = list(run.checks())
        entry = subject.entry
        facts = {
            "device": f"{entry.name}:{subject.index}", "name": entry.name, "distribution": entry.distribution,
            "version": entry.version, "seed": selection.seed, "machine": machine(), "total": len(checks),
            "folders": subject.folders,
        }  # fmt: skip
        isolation.emit(facts=facts)
        part = selection.part
        mine = [at for at, check in enumerate(checks) if part is None or part.takes(at, check.beside)]
        for at in mine[skip:]:
            check = checks[at]
            isolation.begin(run.named(check), check.patience, at)
            arm(selection.patience or check.patience)
            isolation.emit(verdict=asdict(run.verdict(check)))
        report = run.report((), 0.0)
        isolation.emit(report={**facts, "name": report.name, "next_step": report.next_step})
    finally:
        run.close()


def machine() -> dict[str, str]:
    """What the run ran on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _made(group: Group, subject: Subject, seed: int) -> list[Check]:
    """Samples of contracts are of the run's seed; other checks get theirs when they run."""
    with varied(seed):
        return list(group.made(subject))


def _raiser(error: BaseException) -> Callable[[Subject, int], Measure]:
    def body(subject: Subject, seed: int) -> Measure:
        raise error

    return body


def _message(error: BaseException) -> str:
    if isinstance(error, HardpointError):
        return error.message
    return str(error)


def unavailable(error: BaseException) -> bool:
    """Whether an error says that there is no such device, and not that a plugin is broken."""
    return isinstance(error, DeviceUnavailable)
