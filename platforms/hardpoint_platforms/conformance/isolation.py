"""The run in processes of its own, so that a plugin that crashes or blocks the interpreter is a verdict, too.

parent                                   child (the same command with --stream)
starts the child, reads its lines        device, then per check: begin, verdict; at the end: report
child gone or silent: fails the check    (gone)
starts another, behind that check        goes on

With --jobs, several children share the device: each takes its share of the checks that do not mind, and after them one
takes the others. On a device whose kernels are compiled at first use most of the time is the processor's.
"""

from __future__ import annotations

import faulthandler
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hardpoint_platforms.conformance.ladder import reached
from hardpoint_platforms.conformance.lane import GRACE, MOST_DEATHS, Lane
from hardpoint_platforms.conformance.verdict import Report, Verdict

Progress = Callable[[int, int, Verdict], None]


@dataclass(frozen=True)
class Part:
    """A share of the checks. Of `count` lanes, lane `index` (from 1) takes every count-th check that may run beside
    others on the same device; index 0 stands for the one that takes all the rest, alone."""

    index: int
    count: int

    @classmethod
    def of(cls, text: str) -> Part:
        """From "INDEX/COUNT"."""
        index, _, count = text.partition("/")
        return cls(int(index), int(count))

    def takes(self, place: int, beside: bool) -> bool:
        """Whether a check at `place` among all is this part's."""
        return beside and place % self.count == self.index - 1 if self.index else not beside

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def emit(**event: Any) -> None:
    """One line for the parent."""
    print(json.dumps(event), flush=True)


class Supervisor:
    """Runs children until every check has a verdict."""

    def __init__(
        self,
        launch: Sequence[str],
        patience: float | None,
        progress: Progress | None,
        jobs: int = 1,
        within: float | None = None,
    ) -> None:
        """`launch`: the command without --stream; `patience`: of --timeout; `progress` gets (done, of, verdict).

        jobs: children that may share the device; within: seconds for all of it, None for any time.
        """
        self._launch, self._patience, self._progress, self._jobs = list(launch), patience, progress, jobs
        self._ends = None if within is None else time.monotonic() + within
        self._done = 0
        self._telling = threading.Lock()

    def run(self, partial: bool, asked: int) -> Report:
        """The report over all children. Raises PlatformError where the device cannot even be named."""
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            lanes = self._lanes(Path(folder))
        verdicts = [verdict for _, verdict in sorted((v for lane in lanes for v in lane.verdicts), key=lambda v: v[0])]
        facts = {**lanes[0].facts, **next((lane.report for lane in lanes if lane.report), {})}
        level, advice = None, str(facts.get("next_step", ""))
        if not all(lane.report for lane in lanes):
            advice = f"{MOST_DEATHS} processes were lost: mend the checks that failed first"
        if not partial:
            level, advice = reached(verdicts, asked)
        keys = ("device", "name", "distribution", "version", "seed", "machine")
        return Report(
            **{key: facts[key] for key in keys},
            asked=asked,
            partial=partial,
            reached=level,
            next_step=advice,
            verdicts=tuple(verdicts),
            seconds=time.perf_counter() - started,
        )

    def _lanes(self, folder: Path) -> list[Lane]:
        """All lanes, run."""

        def lane(part: Part | None = None) -> Lane:
            launch = [*self._launch, *(() if part is None else ("--part", str(part)))]
            return Lane(launch, self._patience, self._ends, self._told, folder / f"faults-{part.index if part else 0}")

        if self._jobs == 1:
            lanes = [lane()]
        else:
            lanes = [lane(Part(index, self._jobs)) for index in range(1, self._jobs + 1)]
            with ThreadPoolExecutor(self._jobs) as pool:
                list(pool.map(Lane.run, lanes))
            lanes.append(lane(Part(0, self._jobs)))
        lanes[-1].run()
        return lanes

    def _told(self, total: int, verdict: Verdict) -> None:
        with self._telling:
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, total, verdict)


def begin(verdict: Verdict, patience: float, place: int) -> None:
    """Tell that a check starts; `verdict` is what it is called, `place` where it stands among all."""
    emit(begin={"verdict": asdict(verdict), "patience": patience, "place": place})


@contextmanager
def last_words(path: Path | None) -> Iterator[Callable[[float], None]]:
    """Have crashes write their frames to `path`. Yields arm(seconds): a check that takes longer writes them, too."""
    if path is None:
        yield lambda seconds: None
        return
    with path.open("w", encoding="utf-8") as file:
        faulthandler.enable(file)
        yield lambda seconds: faulthandler.dump_traceback_later(seconds + GRACE / 2, file=file)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
