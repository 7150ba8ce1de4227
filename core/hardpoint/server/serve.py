"""Running the application until a signal or the engine's death ends it.

first SIGTERM or SIGINT   drain: new requests get 503, running ones finish, then exit 0
drain_timeout over        running streams get an error event, then exit 0
second signal             the same at once, exit 128 + signal
engine gone               running requests get an error, /health is 503, then exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from hardpoint.config.server import ServerConfig
from hardpoint.errors import ConfigError, EngineBusy, EngineDead
from hardpoint.protocol.messages import EngineInfo
from hardpoint.server.service import Service

#: Between the engine's death and the end of the process: running requests get their errors, probes see 503.
DEATH_GRACE_S = 1.0
#: For connections to take their last bytes.
CLOSE_TIMEOUT_S = 3

_log = logging.getLogger("hardpoint.server")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError that names --host or --port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
    except OSError as exc:
        raise ConfigError(f"--host {host} cannot be resolved: {exc.strerror or exc}") from exc
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {exc.strerror or exc}",
            hint="Another server may run there; choose another with --port.",
        ) from exc
    listener.setblocking(False)
    return listener


def run(
    app: FastAPI,
    server: ServerConfig,
    *,
    listener: socket.socket | None = None,
    on_ready: Callable[[EngineInfo], None] | None = None,
) -> int:
    """Serve `app` (of `create_app`) and return the exit code.

    Starts the app's engine client, answers 503 while it loads, and calls `on_ready` once it serves. Closes the client
    at the end. Raises what the client's start raised, and ConfigError for an address that cannot be had.
    """
    sock = listener if listener is not None else bind(server.host, server.port)
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="auto",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    runner = _Server(config, app.state.service, server.drain_timeout)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as loop:
        return loop.run(_serve(runner, sock, on_ready))


async def _serve(runner: _Server, sock: socket.socket, on_ready: Callable[[EngineInfo], None] | None) -> int:
    client = runner.service.client

    async def start() -> None:
        await client.start()
        if on_ready is not None:
            on_ready(client.info)

    starting = asyncio.create_task(start())
    starting.add_done_callback(runner.start_ended)
    try:
        await runner.serve(sockets=[sock])
    finally:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # told below, or nobody waits for it any more
            await starting
        await client.close()
    if runner.start_error is not None:
        raise runner.start_error
    return runner.exit_code


class _Server(uvicorn.Server):
    """uvicorn, with our way of ending: decisions are made in `on_tick`, ten times a second."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout: float) -> None:
        super().__init__(config)
        self.service = service
        self.exit_code = 0
        self.start_error: BaseException | None = None
        self._drain_timeout = drain_timeout
        self._signals: list[int] = []
        self._drain_until: float | None = None
        self._died_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal; uvicorn's own way would end the process with it."""
        self._signals.append(sig)

    def start_ended(self, task: asyncio.Task[None]) -> None:
        """The engine client's start is over, well or not."""
        if not task.cancelled() and task.exception() is not None:
            self.start_error = task.exception()
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop serving."""
        ended = await super().on_tick(counter)
        return ended or self._engine_ended() or self._signals_end()

    def _engine_ended(self) -> bool:
        client = self.service.client
        if not client.gone or self.start_error is not None:
            return False
        now = time.monotonic()
        if self._died_at is None:
            self._died_at = now
            try:
                client.check_health()
            except EngineDead as exc:
                _log.critical("%s", exc)
            self.exit_code = 1
        if now - self._died_at < DEATH_GRACE_S:
            return False
        self.service.lifecycle.stop(EngineDead("The engine is gone."))
        return True

    def _signals_end(self) -> bool:
        lifecycle = self.service.lifecycle
        if not self._signals:
            return False
        if self._drain_until is None:
            lifecycle.begin_drain()
            self._drain_until = time.monotonic() + self._drain_timeout
            if lifecycle.in_flight and self._drain_timeout > 0:
                _log.warning(
                    "draining: %d requests get up to %g s to finish; a second signal ends them at once",
                    lifecycle.in_flight,
                    self._drain_timeout,
                )
        hurried = len(self._signals) > 1
        if hurried:
            self.exit_code = 128 + self._signals[-1]
        if not hurried and lifecycle.in_flight and time.monotonic() < self._drain_until:
            return False
        lifecycle.stop(EngineBusy("The server is shutting down and ended this request."))
        return True
