"""The engine in a process of its own: the client that the server uses."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

import hardpoint.errors as core_errors
import hardpoint_platforms.errors as platform_errors
from hardpoint.config.engine import EngineConfig
from hardpoint.engine.launch import Launched
from hardpoint.engine.process import DEFAULT_BUILDER, EngineProcess
from hardpoint.errors import EngineDead
from hardpoint.frontend.streams import ClientTokenizer, StreamingClient
from hardpoint.protocol.codec import ProtocolError, check_version
from hardpoint.protocol.messages import Failure, FromEngine, Heartbeat, Outputs, Progress, Ready, Shutdown, ToEngine
from hardpoint_platforms.errors import HardpointError

#: Seconds that an engine that was told to stop gets before it is killed.
STOP_TIMEOUT = 5.0
#: Seconds for the last messages of a dead process to come through.
LAST_WORDS = 0.05


class RemoteEngineClient(StreamingClient):
    """Starts the engine process in the constructor (unless it is given: `launched`), so that it loads while the caller
    does other things.

    config: what to serve. tokenizer: of the same model; it can also be given later (`use_tokenizer`), so that it is
    loaded while the process starts. health_timeout: seconds without a sign of life after which `check_health` raises,
    until it comes back. on_progress: called with (phase, share done).
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: ClientTokenizer | None = None,
        *,
        health_timeout: float = 10.0,
        on_progress: Callable[[str, float], None] | None = None,
        builder: str = DEFAULT_BUILDER,
        launched: Launched | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self._health_timeout = health_timeout
        self._step_timeout = config.device.step_timeout
        self._on_progress = on_progress
        self._process = EngineProcess(config, builder=builder, launched=launched)
        self._started: asyncio.Future[None] | None = None
        self._failure: Failure | None = None
        self._closing = False
        self._last_life = time.monotonic()
        self._busy_for = 0.0

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of the engine process; None while it runs, negative for a signal."""
        return self._process.exit_code

    async def start(self) -> None:
        """Wait until the engine serves. Raises what its start-up raised (HardpointError)."""
        loop = asyncio.get_running_loop()
        if self._started is None:
            self._started = loop.create_future()
            # an error that nobody waits for is not worth a warning: check_health tells it too
            self._started.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._process.channel.attach(loop, self._receive)
            self._process.watch(lambda code: _call_soon(loop, self._note_exit, code))
        await asyncio.shield(self._started)

    def check_health(self) -> None:
        if self._dead is None and self._info is not None:
            # this process may have slept itself: read what has come before judging
            self._process.channel.drain()
        super().check_health()
        silent = time.monotonic() - self._last_life
        if silent > self._health_timeout:
            raise EngineDead(f"no sign of life from the engine (process {self.pid}) for {silent:.0f} s")
        if self._busy_for > self._step_timeout:
            raise EngineDead(f"the engine hangs: its present step takes {self._busy_for:.0f} s already")

    async def close(self) -> None:
        """Stop the engine; kill it if it takes more than 5 s. Running requests are aborted. May be called again."""
        if not self._closing:
            self._closing = True
            for request_id in list(self._streams):
                await self.abort(request_id)
            self._fail_all(EngineDead("the engine was stopped"))
            self._process.channel.send(Shutdown())
            if self._info is None:
                self._process.hang_up()  # it does not listen yet
        await asyncio.get_running_loop().run_in_executor(None, self._process.end, STOP_TIMEOUT)
        self._process.release()

    def _send(self, message: ToEngine) -> None:
        self._process.channel.send(message)

    def _receive(self, message: FromEngine) -> None:
        self._last_life = time.monotonic()
        if isinstance(message, Outputs):
            self._receive_outputs(message)
        elif isinstance(message, Heartbeat):
            self._busy_for = message.busy_for
        elif isinstance(message, Progress):
            if self._on_progress is not None:
                self._on_progress(message.phase, message.done)
        elif isinstance(message, Ready):
            self._ready(message)
        else:
            self._failure = message
            self._die(startup_error(message))

    def _ready(self, message: Ready) -> None:
        try:
            check_version(message.protocol)
        except ProtocolError as error:
            self._die(EngineDead(str(error)))
            return
        self._info = message.info
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _note_exit(self, code: int) -> None:
        """The process is gone; its last messages may still be under way."""
        self._process.channel.drain()
        asyncio.get_running_loop().call_later(LAST_WORDS, self._bury, code)

    def _bury(self, code: int) -> None:
        self._process.channel.drain()
        if self._dead is None:
            self._die(EngineDead(f"the engine process ended unexpectedly ({describe_exit(code)})", hint=_hint(code)))

    def _die(self, error: HardpointError) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        dead = error if isinstance(error, EngineDead) else EngineDead(error.message, hint=error.hint)
        self._fail_all(dead)


def startup_error(failure: Failure) -> HardpointError:
    """The failure as the exception that the engine had, where its kind can be told again."""
    kind = getattr(core_errors, failure.kind, None) or getattr(platform_errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, HardpointError):
        try:
            return kind(failure.message, hint=failure.hint)
        except TypeError:
            return HardpointError(failure.message, hint=failure.hint)
    return core_errors.EngineError(failure.message, hint=failure.hint)


def describe_exit(code: int) -> str:
    """An exit code for people: "exit code 1", "SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _hint(code: int) -> str | None:
    if code == -signal.SIGKILL:
        return "the system may have run out of memory: see its log (dmesg), and lower --kv-cache-memory"
    return "see the engine's messages above" if code else None


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[int], None], code: int) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, code)
