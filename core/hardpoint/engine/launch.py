"""Launching the engine process before anything of the front end is imported, so that both load at the same time.

This module is light on purpose: the process exists as soon as the command line is understood, and gets its
configuration (`hardpoint.engine.process`) when the front end has imported what it takes to send it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Launched:
    """An engine process that waits for its configuration on stdin; closing stdin ends it.

    Attributes:
        process: with a pipe to its stdin.
        by_main_thread: whether the thread that started it lives as long as this process.
    """

    process: subprocess.Popen[bytes]
    by_main_thread: bool

    def cancel(self) -> None:
        """End it before it was used."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def launch_engine() -> Launched:
    """Start the process, with this one's sys.path and environment. Raises OSError where none can be had."""
    # numpy's BLAS computes nothing in an engine, yet its threads spin while numpy is imported.
    environment = {"OPENBLAS_NUM_THREADS": "1"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "hardpoint.engine.process"],
        stdin=subprocess.PIPE,
        stdout=2,  # what libraries print there must not mix with the front end's output
        env=environment,
        process_group=0,  # Ctrl-C in a terminal reaches the front end alone
    )
    return Launched(process, threading.current_thread() is threading.main_thread())
