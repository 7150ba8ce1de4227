"""An engine that stands still is ended, by name: a kernel may hang where it is tried, built, warmed up, or in a step.

    thread that builds                          heartbeat thread
    startup("weights", 0.4)    each piece       startup.fault() once a second: None, or what to tell
    an op, a program, a weight, a phase         tells it, and ends the process

    thread that steps
    pulse.busy()               each round       steps.fault(), likewise

A thread that hangs cannot be stopped from within its process; hence the end of the process.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hardpoint_platforms import guarding
from hardpoint_platforms.errors import HardpointError

if TYPE_CHECKING:
    from hardpoint_platforms.binding import OpTable
    from hardpoint_platforms.device import Device

#: Seconds beyond the patience after which a process whose interpreter is blocked is ended without words of ours.
GRACE = 3.0


class Watch(ABC):
    """Looked at once a second by the heartbeat thread."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds that a piece of work may take."""
        self._patience = patience

    @abstractmethod
    def fault(self) -> HardpointError | None:
        """What to tell of work that takes longer than it may; None while it may."""

    def arm(self) -> None:
        """A look in vain: from now on the process has its patience, and a little more, until the next look.

        If a plugin keeps the interpreter locked, no thread of ours runs: then every thread's lines go to stderr, and
        the process ends.
        """
        faulthandler.dump_traceback_later(self._patience + GRACE, exit=True)


class Startup(Watch):
    """Called with (phase, share done) before each piece of a start-up, by the thread that made it.

    `parts`, once known, are the devices with their op tables; by these a hanging kernel is named.
    """

    def __init__(self, patience: float, report: Callable[[str, float], None]) -> None:
        """`patience`: seconds that one piece may take; `report` gets what this is called with."""
        super().__init__(patience)
        self.parts: Sequence[tuple[Device, OpTable]] = ()
        self._report = report
        self._thread = threading.get_ident()
        self._phase, self._moved = "start", time.monotonic()

    def __call__(self, phase: str, done: float) -> None:
        self._phase, self._moved = phase, time.monotonic()
        self._report(phase, done)

    def fault(self) -> HardpointError | None:
        if time.monotonic() - self._moved <= self._patience:
            return None
        told = f"does not come back: no progress for {self._patience:g} s in phase {self._phase!r} of starting"
        more = "; if it is only slow, raise --startup-timeout"
        error = guarding.hung(self._thread, self.parts, told)
        if error is not None:
            error.hint = f"{error.hint}{more}" if error.hint else more.removeprefix("; ")
            return error
        stands = guarding.of_thread(self._thread)
        place = f", at {stands[0]}" if stands else ""
        return HardpointError(f"the engine hangs: it {told}{place}", hint=more.removeprefix("; "))


class Steps(Watch):
    """The steps of an engine that serves. `busy_for`: seconds since the loop last came round, 0 when idle."""

    def __init__(self, patience: float, busy_for: Callable[[], float], parts: Sequence[tuple[Device, OpTable]]) -> None:
        super().__init__(patience)
        self._busy_for, self._parts = busy_for, parts

    def fault(self) -> HardpointError | None:
        busy = self._busy_for()
        if busy <= self._patience:
            return None
        stands = f"does not come back: a step takes {busy:.0f} s already"
        more = "if steps are that long, raise --step-timeout"
        # Kernels are called by the loop's thread or by the executor's.
        for thread in threading.enumerate():
            error = guarding.hung(thread.ident or 0, self._parts, stands)
            if error is not None:
                error.hint = f"{error.hint}; {more}" if error.hint else more
                return error
        devices = ", ".join(str(device.info) for device, _ in self._parts) or "the device"
        told = f"the engine hangs: a step takes {busy:.0f} s already, {devices} does not answer"
        return HardpointError(told, hint=more)


def disarm() -> None:
    """Nothing is under way."""
    faulthandler.cancel_dump_traceback_later()
