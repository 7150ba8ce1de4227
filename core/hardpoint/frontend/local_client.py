"""The engine on a thread of this process: the same client without a second process, for tests and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from hardpoint.engine.lifecycle import Builder, Pulse, serve_engine
from hardpoint.errors import EngineDead
from hardpoint.frontend.remote_client import startup_error
from hardpoint.frontend.streams import ClientTokenizer, StreamingClient
from hardpoint.protocol.channel import MemoryChannel
from hardpoint.protocol.messages import Failure, FromEngine, Outputs, Progress, Ready, Shutdown, ToEngine
from hardpoint_platforms.errors import HardpointError


class LocalEngineClient(StreamingClient):
    """Runs the engine's loop on a thread. `builder` makes the engine there, reporting (phase, share done)."""

    def __init__(
        self,
        builder: Builder,
        tokenizer: ClientTokenizer | None = None,
        *,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self._builder = builder
        self._on_progress = on_progress
        self._channel = MemoryChannel()
        self._started: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        if self._started is None:
            loop = asyncio.get_running_loop()
            self._started = loop.create_future()
            self._channel.attach(loop, self._receive)
            self._thread = threading.Thread(
                target=serve_engine,
                args=(self._channel, self._builder, Pulse()),
                name="hardpoint-engine",
                daemon=True,
            )
            self._thread.start()
        await asyncio.shield(self._started)

    async def close(self) -> None:
        for request_id in list(self._streams):
            await self.abort(request_id)
        self._fail_all(EngineDead("the engine was stopped"))
        self._channel.tell(Shutdown())
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _send(self, message: ToEngine) -> None:
        self._channel.tell(message)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._receive_outputs(message)
        elif isinstance(message, Ready):
            self._info = message.info
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
        elif isinstance(message, Progress):
            if self._on_progress is not None:
                self._on_progress(message.phase, message.done)
        elif isinstance(message, Failure):
            self._die(startup_error(message))

    def _die(self, error: HardpointError) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        self._fail_all(EngineDead(error.message, hint=error.hint))
