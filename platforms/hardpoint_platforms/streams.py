"""Streams, events, read-backs and the clock. The defaults do everything at once and use the wall clock."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # the engine's loop has a clock and no torch
    import torch


class Event:
    """A point in a stream's work. The default stream has finished everything already."""

    def done(self) -> bool:
        """Whether the work before the event has finished, without waiting."""
        return True

    def wait(self) -> None:
        """Block the calling host thread until the work before the event has finished."""


class Stream:
    """An ordered queue of device work; a context manager that makes it the current one of this thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def record(self) -> Event:
        """An event behind all work queued so far."""
        return Event()

    def wait_for(self, event: Event) -> None:
        """Make later work of this stream wait for `event`, without blocking the host."""
        event.wait()

    def synchronize(self) -> None:
        """Block the host until everything queued has finished."""


class Readback:
    """Tensors on their way to the host. The default has them already."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Host tensors, in order. Blocks until they are there, and not for work that was queued behind them."""
        return self._tensors


class Clock:
    """The only source of time in the engine loop, so that a simulated device can run on virtual time."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        time.sleep(seconds)
