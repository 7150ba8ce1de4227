"""Runs plugin code on a thread that may be given up: a hang is a verdict, not the end of the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hardpoint_platforms.conformance import blame


class Hung(Exception):
    """The work did not end in time. `place` is where its thread stands."""

    def __init__(self, seconds: float, place: str) -> None:
        super().__init__(f"did not end within {seconds:g} s")
        self.place = place


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None


class Watchdog:
    """One thread for all checks, so that a device is used by one thread; a new one after a hang."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = folders
        self._start()

    def run(self, work: Callable[[], Any], seconds: float) -> Any:
        """The work's result, or what it raised. Raises Hung; the thread is left behind then."""
        self._work.put(work)
        try:
            outcome = self._done.get(timeout=seconds)
        except queue.Empty:
            place = blame.of_thread(self._thread, self._folders)
            self._work.put(None)  # should it ever end, the thread ends too
            self._start()
            raise Hung(seconds, place) from None
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def close(self) -> None:
        """Let the thread end."""
        self._work.put(None)

    def _start(self) -> None:
        self._work: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._done: queue.Queue[_Outcome] = queue.Queue()
        self._thread = threading.Thread(
            target=_serve, args=(self._work, self._done), name="conformance checks", daemon=True
        )
        self._thread.start()


def _serve(work: queue.Queue[Callable[[], Any] | None], done: queue.Queue[_Outcome]) -> None:
    while (task := work.get()) is not None:
        try:
            done.put(_Outcome(task()))
        except BaseException as error:  # SystemExit of a plugin too: it is handed to who asked
            done.put(_Outcome(error=error))
