"""The life of an engine behind a channel: build it, serve until told to stop, and tell how it ended.

`serve_engine` is the body of the engine process (`hardpoint.engine.process`) and, for tests and in-process use, of a
thread. It holds no sockets and installs no signal handlers; that is the process's part.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from hardpoint.protocol.channel import EngineSide
from hardpoint.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineInfo,
    Failure,
    Outputs,
    Progress,
    Ready,
    ResetPrefixCache,
    Shutdown,
    Submit,
    ToEngine,
)
from hardpoint_platforms.errors import HardpointError

if TYPE_CHECKING:
    from hardpoint.engine.loop import Engine
    from hardpoint.engine.watch import Watch

log = logging.getLogger(__name__)

#: Seconds between looks at a scheduler that has requests but cannot run any.
STALL_WAIT = 0.02
#: Seconds without a request after which the device may do what it put off at the start: who talks to it in turns should
#: not wait for that.
QUIET = 0.2
#: Seconds between messages that bring nothing but gauges.
STATS_INTERVAL = 0.25


class BuiltEngine(Protocol):
    """What a builder returns: `hardpoint.engine.build.BuiltEngine` and whatever looks like it."""

    @property
    def engine(self) -> Engine:
        """Ready to serve."""

    @property
    def info(self) -> EngineInfo:
        """What it turned out to be."""


#: Makes the engine, reporting (phase, share done).
Builder = Callable[[Callable[[str, float], None]], BuiltEngine]


class Pulse:
    """Since when the loop has been busy with one round; written by the loop, read by the heartbeat thread.

    `watch` looks after what is under way: the start-up, then steps.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._round_started: float | None = None

    def busy(self) -> None:
        """A round begins."""
        self._round_started = time.monotonic()

    def idle(self) -> None:
        """The loop waits for messages."""
        self._round_started = None

    def busy_for(self) -> float:
        """Seconds since the round began; 0 when idle."""
        started = self._round_started
        return 0.0 if started is None else time.monotonic() - started


def serve_engine(channel: EngineSide, builder: Builder, pulse: Pulse | None = None) -> int:
    """Build and serve until Shutdown. Returns the exit code: 0, or 1 after a Failure has been sent."""
    pulse = pulse or Pulse()
    try:
        built = builder(lambda phase, done: channel.send(Progress(phase, done)))
    except HardpointError as error:
        channel.send(failure_of(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        channel.send(failure_of(error, "the traceback is on the engine's stderr; this is a bug, please report it"))
        return 1
    channel.send(Ready(PROTOCOL_VERSION, built.info))
    return _Server(channel, built.engine, pulse).serve()


def failure_of(error: Exception, hint: str | None = None) -> Failure:
    """What people get to read of an exception."""
    if isinstance(error, HardpointError):
        return Failure(error.message, error.hint, type(error).__name__)
    text = str(error)
    return Failure(f"{type(error).__name__}: {text}" if text else type(error).__name__, hint)


class _Server:
    """The loop around the loop: messages in, steps, outputs out."""

    def __init__(self, channel: EngineSide, engine: Engine, pulse: Pulse) -> None:
        self._channel = channel
        self._engine = engine
        self._pulse = pulse
        self._stopping = False
        self._stats_due = True
        self._stats_sent = 0.0
        #: Seconds to wait for a message before the device catches up; None where it has nothing left to do.
        self._quiet: float | None = QUIET

    def serve(self) -> int:
        while True:
            try:
                self._round()
            except Exception as error:
                return self._fail(error)
            if self._stopping:
                self._engine.close()
                return 0

    def _round(self) -> None:
        """Take every message that has come, so that aborts count before the next step; then run one step."""
        engine = self._engine
        wait: float | None = 0.0
        if not engine.has_work:
            self._send_idle_stats()
            self._pulse.idle()
            wait = self._quiet
        elif engine.stalled:
            wait = STALL_WAIT
        messages = self._channel.receive(wait)
        for message in messages:
            self._handle(message)
        self._pulse.busy()
        if self._stopping:
            return
        if not engine.has_work:
            if not messages and self._quiet is not None:
                self._quiet = 0.0 if engine.catch_up() else None
            return
        self._quiet = QUIET
        outputs = engine.step()
        self._stats_due = True
        if outputs.outputs or time.monotonic() - self._stats_sent > STATS_INTERVAL:
            self._send(outputs)

    def _handle(self, message: ToEngine) -> None:
        self._stats_due = True
        if isinstance(message, Submit):
            for request in message.requests:
                self._engine.add(request)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._engine.abort(request_id)
        elif isinstance(message, ResetPrefixCache):
            self._engine.reset_prefix_cache()
        elif isinstance(message, Shutdown):
            self._stopping = True

    def _send(self, outputs: Outputs) -> None:
        self._channel.send(outputs)
        self._stats_sent = time.monotonic()

    def _send_idle_stats(self) -> None:
        """Gauges go back to zero when the last request ends without an output (abort)."""
        if self._stats_due:
            self._stats_due = False
            self._send(Outputs([], self._engine.stats()))

    def _named(self, error: Exception) -> Exception:
        """With the plugin's name, where it is one's fault; whatever happens, there is something to tell."""
        try:
            return self._engine.named(error)
        except Exception:
            log.exception("whose fault it is could not be found out")
            return error

    def _fail(self, error: Exception) -> int:
        """Nothing that the device held can be trusted: every request ends with an error, and the engine is done."""
        if not isinstance(error, HardpointError):
            traceback.print_exc()
        failure = failure_of(self._named(error))
        told = f"{failure.message} ({failure.hint})" if failure.hint else failure.message
        log.error("the engine stops: %s", told)
        self._channel.send(self._engine.fail(told))
        self._channel.send(failure)
        # a lost device may never answer again, and closing it must not keep the failed engine alive
        closing = threading.Thread(target=self._engine.close, daemon=True)
        closing.start()
        closing.join(2.0)
        return 1
