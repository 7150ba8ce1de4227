"""The engine process, from both sides: `EngineProcess` starts and ends it, `main` is what runs in it.

It is a plain subprocess (`python -m hardpoint.engine.process`), not a fork and not multiprocessing: user scripts need
no main guard, and nothing of the front end's state leaks in. What to do comes as one message over stdin. stdin then
stays open: its end is how the engine learns that the front end is gone, however that happened. The front end owns the
shutdown, so the engine ignores SIGINT and SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module

import msgspec

from hardpoint.config.engine import EngineConfig
from hardpoint.engine.launch import Launched, launch_engine
from hardpoint.engine.lifecycle import BuiltEngine, Pulse, failure_of, serve_engine
from hardpoint.engine.startup import lasting_objects
from hardpoint.engine.watch import Startup, Steps, Watch, disarm
from hardpoint.protocol.channel import Addresses, EngineChannel, FrontChannel, PulseSender
from hardpoint.protocol.codec import check_version
from hardpoint.protocol.messages import PROTOCOL_VERSION, Heartbeat
from hardpoint_platforms.host_memory import give_back_memory

log = logging.getLogger(__name__)

#: "module:function" taking (config, progress) and returning a BuiltEngine.
DEFAULT_BUILDER = "hardpoint.engine.build:build_engine"
#: Seconds.
HEARTBEAT_INTERVAL = 1.0
#: Seconds for the message of a hanging start to leave the process.
LAST_WORDS = 0.5
#: Seconds. The thread that launches steps and the one that schedules them share the interpreter: at Python's own 5 ms,
#: a step would wait for the other's bookkeeping each time it needs a line of Python.
SWITCH_INTERVAL = 1e-4
_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process is told over stdin."""

    protocol: int
    config: EngineConfig
    builder: str
    addresses: Addresses
    parent: int
    die_with_parent: bool
    log_level: int


class EngineProcess:
    """The front end's handle: configures the process, sees its end, and makes sure of it. Owns it and the channel."""

    def __init__(
        self, config: EngineConfig, *, builder: str = DEFAULT_BUILDER, launched: Launched | None = None
    ) -> None:
        """`launched`: a process that waits already (of `launch_engine`); else one is started."""
        launched = launched or launch_engine()
        self._process = launched.process
        try:
            self.channel = FrontChannel()
        except BaseException:
            launched.cancel()
            raise
        start = Start(
            protocol=PROTOCOL_VERSION,
            config=config,
            builder=builder,
            addresses=self.channel.addresses,
            parent=os.getpid(),
            # the kernel means the thread that started the process; only the main thread lives as long as ours
            die_with_parent=launched.by_main_thread,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        try:
            assert self._process.stdin is not None
            data = msgspec.msgpack.encode(start)
            with contextlib.suppress(BrokenPipeError):  # died already: the watcher will tell
                self._process.stdin.write(_LENGTH.pack(len(data)) + data)
                self._process.stdin.flush()
        except BaseException:
            self.channel.close()
            launched.cancel()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    def watch(self, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit` with the exit code once it is gone, from another thread."""
        threading.Thread(
            target=lambda: on_exit(self._process.wait()), name="hardpoint-engine-watch", daemon=True
        ).start()

    def end(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for it to end, then kill. Returns the exit code. Blocks; touches no socket."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            log.warning("the engine did not stop within %.0f s: killing it", timeout)
            self._process.kill()
            return self._process.wait()

    def release(self) -> None:
        """Close channel and pipe."""
        self.channel.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close the pipe, by which the engine knows of us: it exits at once."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def main() -> int:
    """The engine process."""
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = _read_start()
    check_version(start.protocol)
    _tie_to_parent(start)
    logging.basicConfig(
        stream=sys.stderr,
        level=start.log_level,
        format="%(asctime)s %(levelname)s engine %(name)s: %(message)s",
    )
    pulse, over = Pulse(), threading.Event()
    threading.Thread(target=_beat, args=(start.addresses, pulse, over), name="heartbeat", daemon=True).start()
    channel = EngineChannel(start.addresses)
    try:
        code = serve_engine(channel, partial(_build, start, pulse), pulse)
    finally:
        channel.close()
        over.set()
    if code:
        # threads of a broken device may never end
        sys.stderr.flush()
        os._exit(code)
    return code


def _build(start: Start, pulse: Pulse, progress: Callable[[str, float], None]) -> BuiltEngine:
    module, _, function = start.builder.partition(":")
    pulse.watch = startup = Startup(start.config.device.startup_timeout, progress)
    startup.arm()  # a plugin may lock the interpreter before the heartbeat thread looks
    try:
        with lasting_objects():
            built: BuiltEngine = getattr(import_module(module), function)(start.config, startup)
    finally:
        pulse.watch = None
    pulse.watch = Steps(start.config.device.step_timeout, pulse.busy_for, startup.parts)
    give_back_memory()
    return built


def _read_start() -> Start:
    """The start message. Exits if the front end is gone already."""
    (length,) = _LENGTH.unpack(_read_exactly(_LENGTH.size))
    return msgspec.msgpack.decode(_read_exactly(length), type=Start)


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(1)
        data += piece
    return data


def _tie_to_parent(start: Start) -> None:
    """End with the front end: by the kernel where it can (even while stopped or stuck), and by the end of stdin."""
    if start.die_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != start.parent:
            os._exit(1)
    threading.Thread(target=_exit_at_end_of_stdin, name="parent-watch", daemon=True).start()


def _exit_at_end_of_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _beat(addresses: Addresses, pulse: Pulse, over: threading.Event) -> None:
    """A sign of life per second, from a thread of its own, so that a long step does not look like death.

    It also ends an engine that hangs.
    """
    sender = PulseSender(addresses)
    while True:
        sender.send(Heartbeat(pulse.busy_for()))
        _look_after(pulse.watch, sender)
        if over.wait(HEARTBEAT_INTERVAL):
            sender.close()
            return


def _look_after(watch: Watch | None, sender: PulseSender) -> None:
    if watch is None:
        disarm()
        return
    error = watch.fault()
    if error is None:
        watch.arm()
        return
    log.error("the engine stops: %s", error)
    sender.send(failure_of(error))
    time.sleep(LAST_WORDS)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
