"""Engines without a model, for tests of what is around them. The functions are builders for `engine.process`."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hardpoint.config.engine import EngineConfig
from hardpoint.engine.loop import Engine
from hardpoint.errors import ConfigError
from hardpoint.executor.base import Executor, StepHandle
from hardpoint.executor.null import FinishedStep, NullExecutor
from hardpoint.kv.pager import KVPager
from hardpoint.protocol.messages import EngineInfo
from hardpoint.scheduler.plan import StepPlan
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings
from hardpoint_platforms.errors import DeviceLost

Progress = Callable[[str, float], None]
VOCAB = 256


@dataclass(frozen=True)
class Built:
    engine: Engine
    info: EngineInfo


class PacedExecutor(Executor):
    """The null executor, with a pause per step, steps that break, and pieces of work that it put off."""

    def __init__(self, seconds: float = 0.0, lost_at: int | None = None, put_off: int = 0) -> None:
        self._inner = NullExecutor(VOCAB)
        self._seconds = seconds
        self._lost_at = lost_at
        self.put_off = put_off
        self.plans: list[StepPlan] = []
        self.closed = False

    def submit(self, plan: StepPlan) -> StepHandle:
        time.sleep(self._seconds)
        if self._lost_at is not None and plan.step >= self._lost_at:
            raise DeviceLost("the device fell off the bus")
        self.plans.append(plan)
        return FinishedStep(self._inner.submit(plan).result())

    def catch_up(self) -> bool:
        self.put_off -= 1
        return self.put_off > 0

    def close(self) -> None:
        self.closed = True


def scheduler(**changes: Any) -> Scheduler:
    settings = {"max_batch_tokens": 64, "max_num_seqs": 8, "max_model_len": 4096} | changes
    return Scheduler(SchedulerSettings(**settings), KVPager(1025, 16, (None,), True))


def info(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "device": "null:0",
        "device_name": "nothing",
        "device_reason": "a test",
        "tuning": [],
        "dtype": "float32",
        "kv_dtype": "float32",
        "weight_bytes": 0,
        "kv_bytes": 0,
        "num_pages": 1024,
        "page_tokens": 16,
        "max_model_len": 4096,
        "max_concurrency": 4.0,
        "vocab_size": VOCAB,
        "ops": [],
        "fallbacks": [],
        "phases": [],
    }
    return EngineInfo(**(values | changes))


def build(config: EngineConfig, progress: Progress, seconds: float = 0.002, lost_at: int | None = None) -> Built:
    """An engine that draws a token per step of 2 ms."""
    progress("load weights", 0.5)
    engine = Engine(scheduler(), PacedExecutor(seconds, lost_at), overlap=config.scheduler.overlap)
    return Built(engine, info())


def build_fast(config: EngineConfig, progress: Progress) -> Built:
    """Without a pause, for benches."""
    return build(config, progress, seconds=0.0)


def build_losing(config: EngineConfig, progress: Progress) -> Built:
    """The device is lost in step 5."""
    return build(config, progress, lost_at=5)


def build_refused(config: EngineConfig, progress: Progress) -> Built:
    """A setting that cannot be."""
    raise ConfigError(f"{config.model.model} cannot be served here", hint="try another")


def build_broken(config: EngineConfig, progress: Progress) -> Built:
    """A bug."""
    return {}[config.model.model]  # type: ignore[index, no-any-return]


def build_dying(config: EngineConfig, progress: Progress) -> Built:
    """Gone without a word."""
    os._exit(3)


def build_hanging(config: EngineConfig, progress: Progress) -> Built:
    """Never done."""
    progress("a long phase", 0.0)
    threading.Event().wait(60)
    raise AssertionError("somebody should have ended this process")


def build_blocked(config: EngineConfig, progress: Progress) -> Built:
    """Never done, in a native call that keeps the interpreter's lock: no thread of the process can run."""
    ctypes.PyDLL(None).sleep(60)
    raise AssertionError("somebody should have ended this process")


def build_slow(config: EngineConfig, progress: Progress) -> Built:
    """A step takes a minute."""
    return Built(Engine(scheduler(), PacedExecutor(60.0), overlap=True), info())
