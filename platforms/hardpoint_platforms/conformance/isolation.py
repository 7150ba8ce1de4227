"""The run in a process of its own, so that a plugin that crashes or blocks the interpreter is a verdict, too.

parent                                   child (the same command with --stream)
starts the child, reads its lines        device, then per check: begin, verdict; at the end: report
child gone or silent: fails the check    (gone)
starts another, behind that check        goes on
"""

from __future__ import annotations

import faulthandler
import json
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from hardpoint_platforms.conformance.ladder import reached
from hardpoint_platforms.conformance.verdict import Report, Status, Verdict
from hardpoint_platforms.errors import PlatformError

#: Processes that may be lost before the rest is not run.
MOST_DEATHS = 5
#: Seconds of silence, besides a check's own patience, after which a child is given up: loading takes its time.
_LOADING, _GRACE = 300.0, 20.0

_FRAME = re.compile(r'File "(.+?)", line (\d+) in (\S+)')

Progress = Callable[[int, int, Verdict], None]


def emit(**event: Any) -> None:
    """One line for the parent."""
    print(json.dumps(event), flush=True)


class Supervisor:
    """Runs children until every check has a verdict."""

    def __init__(self, launch: Sequence[str], patience: float | None, progress: Progress | None) -> None:
        """`launch`: the command without --stream; `patience`: of --timeout; `progress` gets (done, of, verdict)."""
        self._launch, self._patience, self._progress = list(launch), patience, progress
        self._verdicts: list[Verdict] = []
        self._facts: dict[str, Any] = {}
        self._report: dict[str, Any] = {}
        self._open: dict[str, Any] | None = None
        self._faults = Path()

    def run(self, partial: bool, asked: int) -> Report:
        """The report over all children. Raises PlatformError where the device cannot even be named."""
        with tempfile.TemporaryDirectory() as folder:
            self._faults = Path(folder) / "faults"
            return self._run(partial, asked)

    def _run(self, partial: bool, asked: int) -> Report:
        started = time.perf_counter()
        deaths = 0
        while not self._report:
            ended = self._child(len(self._verdicts))
            if self._report:
                break
            deaths += 1
            self._bury(ended)
            if deaths >= MOST_DEATHS:
                break
        facts = self._report or self._unfinished()
        level, advice = (None, str(facts["next_step"]))
        if not partial:
            level, advice = reached(self._verdicts, asked)
        keys = ("device", "name", "distribution", "version", "seed", "machine")
        return Report(
            **{key: facts[key] for key in keys},
            asked=asked,
            partial=partial,
            reached=level,
            next_step=advice,
            verdicts=tuple(self._verdicts),
            seconds=time.perf_counter() - started,
        )

    def _child(self, skip: int) -> str:
        """One child from check `skip` on. Returns how it ended."""
        self._faults.write_text("", encoding="utf-8")
        command = [*self._launch, "--stream", str(skip), "--faults", str(self._faults)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_feed, args=(child.stdout, lines), daemon=True).start()
            try:
                while True:
                    line = lines.get(timeout=self._silence())
                    if line is None:
                        break
                    self._take(line)
            except queue.Empty:
                child.kill()
                return f"hangs: did not end within {self._silence():g} s, and blocked the interpreter"
            finally:
                if child.poll() is None and self._report:
                    child.wait(30)
                elif child.poll() is None and sys.exc_info()[0] is not None:
                    child.kill()
            return _cause(child.wait())

    def _silence(self) -> float:
        if self._open is None:
            return _LOADING
        return float(self._patience or self._open["patience"]) + _GRACE

    def _take(self, line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not event:
            sys.stderr.write(line)  # something that the plugin printed
            return
        if "error" in event:
            raise PlatformError(event["error"], hint=event["hint"])
        self._facts = event.get("facts", self._facts)
        self._report = event.get("report", self._report)
        self._open = event.get("begin", self._open)
        if "verdict" in event:
            self._open = None
            self._add(Verdict(**{**event["verdict"], "status": Status(event["verdict"]["status"])}))

    def _add(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)
        if self._progress is not None:
            self._progress(len(self._verdicts), int(self._facts["total"]), verdict)

    def _bury(self, ended: str) -> None:
        """Fail the check in which a child was lost."""
        if self._open is None:
            device = self._launch[self._launch.index("--device") + 1]
            where = "between two checks" if self._facts else "while the plugin was loaded"
            raise PlatformError(f"{device}: the process {ended} {where}", hint="see what it wrote to stderr")
        begun, self._open = self._open["verdict"], None
        told = f"{self._facts['distribution']} {self._facts['version']}: {begun['contract']} the process {ended}"
        self._add(Verdict(**{**begun, "status": Status.FAIL, "message": told, "blame": self._place()}))

    def _place(self) -> str:
        """Where in the plugin the lost child stood, as it wrote down with its last breath."""
        text = self._faults.read_text(encoding="utf-8", errors="replace")
        for path, line, name in _FRAME.findall(text):
            if any(Path(path).is_relative_to(folder) for folder in self._facts["folders"]):
                return f"{path}:{line} in {name}"
        return ""

    def _unfinished(self) -> dict[str, Any]:
        """Facts for a run whose children died too often; the rest counts as not run."""
        return {**self._facts, "next_step": f"{MOST_DEATHS} processes were lost: mend the checks that failed first"}


def begin(verdict: Verdict, patience: float) -> None:
    """Tell that a check starts; `verdict` is what it is called."""
    emit(begin={"verdict": asdict(verdict), "patience": patience})


@contextmanager
def last_words(path: Path | None) -> Iterator[Callable[[float], None]]:
    """Have crashes write their frames to `path`. Yields arm(seconds): a check that takes longer writes them, too."""
    if path is None:
        yield lambda seconds: None
        return
    with path.open("w", encoding="utf-8") as file:
        faulthandler.enable(file)
        yield lambda seconds: faulthandler.dump_traceback_later(seconds + _GRACE / 2, file=file)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()


def _feed(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _cause(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"
