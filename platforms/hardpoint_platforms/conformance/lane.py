"""One child after another, until every check of a lane has a verdict: what a plugin kills is a verdict, too."""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from hardpoint_platforms.conformance.verdict import Status, Verdict
from hardpoint_platforms.errors import PlatformError

#: Processes that may be lost before the rest is not run.
MOST_DEATHS = 5
#: Seconds of silence, besides a check's own patience, after which a child is given up: loading takes its time.
LOADING, GRACE = 300.0, 20.0

_FRAME = re.compile(r'File "(.+?)", line (\d+) in (\S+)')


class Lane:
    """Runs children, each from the first check that has no verdict yet. Used by one thread."""

    def __init__(
        self,
        launch: Sequence[str],
        patience: float | None,
        ends: float | None,
        told: Callable[[int, Verdict], None],
        faults: Path,
    ) -> None:
        """`launch`: the command without --stream; `patience`: of --timeout; `told` gets (checks in all lanes, verdict).

        ends: the monotonic time after which no more checks begin; faults: a file for the last words of a child.
        """
        self._launch, self._patience, self._ends = list(launch), patience, ends
        self._told, self._faults = told, faults
        #: (place among the checks of all lanes, verdict), in the order of running.
        self.verdicts: list[tuple[int, Verdict]] = []
        #: What the device and the plugin are called, once a child has said so.
        self.facts: dict[str, Any] = {}
        #: The last words of a child that came to its end; empty where none did.
        self.report: dict[str, Any] = {}
        self._open: dict[str, Any] | None = None

    def run(self) -> None:
        """Until all is done, or too many children were lost. Raises PlatformError where none can even start."""
        deaths = 0
        while not self.report and deaths < MOST_DEATHS:
            ended = self._child(len(self.verdicts))
            if not self.report:
                deaths += 1
                self._bury(ended)

    def _child(self, skip: int) -> str:
        """One child from check `skip` on. Returns how it ended."""
        self._faults.write_text("", encoding="utf-8")
        command = [*self._launch, "--stream", str(skip), "--faults", str(self._faults)]
        if self._ends is not None:
            command += ["--within", str(max(self._ends - time.monotonic(), 0.0))]
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
                if child.poll() is None and self.report:
                    child.wait(30)
                elif child.poll() is None and sys.exc_info()[0] is not None:
                    child.kill()
            return _cause(child.wait())

    def _silence(self) -> float:
        if self._open is None:
            return LOADING
        return float(self._patience or self._open["patience"]) + GRACE

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
        self.facts = event.get("facts", self.facts)
        self.report = event.get("report", self.report)
        self._open = event.get("begin", self._open)
        if "verdict" in event and self._open is not None:
            place, self._open = int(self._open["place"]), None
            self._add(place, Verdict(**{**event["verdict"], "status": Status(event["verdict"]["status"])}))

    def _add(self, place: int, verdict: Verdict) -> None:
        self.verdicts.append((place, verdict))
        self._told(int(self.facts["total"]), verdict)

    def _bury(self, ended: str) -> None:
        """Fail the check in which a child was lost."""
        if self._open is None:
            device = self._launch[self._launch.index("--device") + 1]
            where = "between two checks" if self.facts else "while the plugin was loaded"
            raise PlatformError(f"{device}: the process {ended} {where}", hint="see what it wrote to stderr")
        begun, place, self._open = self._open["verdict"], int(self._open["place"]), None
        told = f"{self.facts['distribution']} {self.facts['version']}: {begun['contract']} the process {ended}"
        self._add(place, Verdict(**{**begun, "status": Status.FAIL, "message": told, "blame": self._place()}))

    def _place(self) -> str:
        """Where in the plugin the lost child stood, as it wrote down with its last breath."""
        text = self._faults.read_text(encoding="utf-8", errors="replace")
        for path, line, name in _FRAME.findall(text):
            if any(Path(path).is_relative_to(folder) for folder in self.facts["folders"]):
                return f"{path}:{line} in {name}"
        return ""


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
