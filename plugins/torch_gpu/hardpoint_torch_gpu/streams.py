"""Streams and events over torch's."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from hardpoint_platforms.streams import Event, Stream


class GpuEvent(Event):
    """Recorded in a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class GpuStream(Stream):
    """A queue of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._entered: list[torch.cuda.StreamContext] = []

    def __enter__(self) -> Self:
        context = torch.cuda.stream(self._stream)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return GpuEvent(event)

    def wait_for(self, event: Event) -> None:
        if isinstance(event, GpuEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def synchronize(self) -> None:
        self._stream.synchronize()
