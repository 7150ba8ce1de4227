"""Server-sent events: the framing, and the response that carries a generation."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hardpoint.server.context import REQUEST_ID
from hardpoint.server.errors import ClientGone, error_json, error_response, status_of
from hardpoint.server.generation import Arrival, Generation
from hardpoint_platforms.errors import HardpointError

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_log = logging.getLogger("hardpoint.server")


def event(data: bytes) -> bytes:
    """One event that holds one line of JSON."""
    return b"data: " + data + b"\n\n"


class ChunkWriter(ABC):
    """Turns deltas into the events of one protocol."""

    @abstractmethod
    def write(self, batch: list[Arrival]) -> bytes:
        """Events for these deltas, complete and joined; may be empty."""

    @abstractmethod
    def finish(self) -> bytes:
        """Events that end a stream without errors, before [DONE]."""


class EventStream(Response):
    """A generation as an event stream.

    The status line waits for the first deltas, so that what the engine refuses is still a plain HTTP error. An error
    after that is an event `{"error": ...}`. Every stream that the client waits for ends with [DONE].
    """

    def __init__(self, generation: Generation, writer: ChunkWriter) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with self._generation as generation:
            generation.start(receive)
            try:
                async for batch in generation.batches():
                    data = self._writer.write(batch)
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                        started = True
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                tail = self._writer.finish()
            except (ClientGone, OSError):  # the server raises OSError for a write to a closed connection
                return
            except Exception as exc:
                if status_of(exc) >= 500:
                    _log.error(
                        "request %s failed: %s",
                        scope.get(REQUEST_ID),
                        exc,
                        exc_info=not isinstance(exc, HardpointError),
                    )
                if not started:
                    await error_response(exc)(scope, receive, send)
                    return
                tail = event(error_json(exc))
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            await send({"type": "http.response.body", "body": tail + DONE, "more_body": False})
