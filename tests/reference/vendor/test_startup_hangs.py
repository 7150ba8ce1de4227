"""A plugin that hangs while the engine starts: it is named with op or program, place and line."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hardpoint.config.engine import EngineConfig
from hardpoint.engine.build import build_engine
from hardpoint.engine.watch import Startup
from hardpoint_platforms.errors import HardpointError

pytestmark = pytest.mark.reference

PLACE = r"faulty_plugin/platform\.py:\d+ in"
ONE = "(Bucket(16, 2), Bucket(0, 0))"
OP = r"add_norm at layers\.{layer}\.\S+ \(faulty add_norm on faulty:0\)"
PROGRAM = r"program of 16 tokens of 2 requests, ANY sampling"


class Start:
    """An engine that is built on a thread, looked at from this one."""

    def __init__(self, make: Callable[..., Any], **changes: str) -> None:
        self._startup: list[Startup] = []
        self._thread = threading.Thread(target=lambda: make(self._build, **changes), daemon=True)
        self.phases: list[str] = []
        self._thread.start()

    def _build(self, config: EngineConfig) -> None:
        self._startup.append(Startup(0.3, lambda phase, done: self.phases.append(phase)))
        build_engine(config, self._startup[0]).engine.close()

    def fault(self) -> HardpointError | None:
        """Of the start-up, as soon as there is one; None where it came to its end."""
        while self._thread.is_alive():
            error = self._startup[0].fault() if self._startup else None
            if error is not None:
                sys.modules["faulty_plugin.platform"].RELEASED.set()
                self._thread.join(30)
                return error
            time.sleep(0.02)
        return None


@pytest.mark.parametrize(
    ("changes", "what", "phase", "where", "level"),
    [
        ({"BODY": "hang()"}, OP.format(layer=0), "trial of the ops", "hang", 1),
        ({"BODY": "y.shape[0] == 8 and hang()"}, OP.format(layer="0"), "warm-up", "hang", 1),
        ({"BUCKETS": ONE, "PROGRAM": "hang()"}, PROGRAM, "programs", "hang", 3),
        ({"BUCKETS": ONE, "PREPARED": "RELEASED.wait(30)"}, PROGRAM, "programs", "prepare", 3),
        ({"BUILT": "hang() or add_norm"}, r"add_norm at layers\.0\.\S+", "bind ops", "hang", 1),
    ],
    ids=["trial", "warm-up", "program-build", "program-preparation", "kernel-build"],
)
def test_a_hang_is_named(
    engine_of: Callable[..., Any], changes: dict[str, str], what: str, phase: str, where: str, level: int
) -> None:
    error = Start(engine_of, **changes).fault()
    assert error is not None
    told = rf"faulty-plugin 0\.3: {what} does not come back: no progress for 0\.3 s in phase '{phase}' of starting"
    assert re.search(rf"{told}, at \S+{PLACE} {where}$", error.message), error.message
    assert error.hint is not None
    assert f"`hardpoint conformance --device faulty --level {level}` " in error.hint
    assert error.hint.endswith("raise --startup-timeout")


def test_pieces_that_come_back_are_no_hang_however_many(engine_of: Callable[..., Any]) -> None:
    """Ten programs, each of which takes a good part of the patience."""
    buckets = f"({', '.join(f'Bucket({n}, 2)' for n in range(2, 12))}, Bucket(0, 0))"
    start = Start(engine_of, BUCKETS=buckets, PREPARED="RELEASED.wait(0.1)")
    assert start.fault() is None
    assert {"trial of the ops", "programs", "warm-up"} <= set(start.phases)
