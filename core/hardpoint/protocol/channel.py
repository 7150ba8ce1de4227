"""The line between front end and engine: a ZeroMQ pair over a socket file in a private folder, or memory.

    front end (asyncio)                          engine (blocking)
    FrontChannel   -- pair:  ToEngine ------>    EngineChannel
                   <- pair:  FromEngine ------
                   <- pulse: Heartbeat -------   PulseSender, on a thread of its own

The front end makes the folder and listens; the engine connects. Once both sockets are connected the folder is removed,
so that nothing stays behind however the processes end.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import shutil
import tempfile
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from hardpoint.protocol.codec import decode_from_engine, decode_to_engine, encode
from hardpoint.protocol.messages import Failure, FromEngine, Heartbeat, ToEngine

#: A socket file's whole path may have 107 characters.
MAX_FOLDER_LENGTH = 80
#: Milliseconds that a closing engine gives its last messages.
LINGER_MS = 2000


class Addresses(msgspec.Struct, frozen=True):
    """Where the engine connects to."""

    pair: str
    pulse: str


class EngineSide(Protocol):
    """The channel as the engine's loop sees it."""

    def receive(self, timeout: float | None) -> list[ToEngine]:
        """All messages that have come; waits up to `timeout` seconds (None: as long as it takes) for a first one."""

    def send(self, message: FromEngine) -> None:
        """Send, without waiting for the other side."""


class FrontChannel:
    """The front end's ends. Made before the engine starts; read by the event loop after `attach`."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(  # mode 0700
            prefix="hardpoint-", dir=base if len(base) <= MAX_FOLDER_LENGTH else "/tmp"
        )
        self.addresses = Addresses(f"ipc://{self._folder}/pair", f"ipc://{self._folder}/pulse")
        self._context = zmq.Context()
        self._pair = self._listen(zmq.PAIR, self.addresses.pair)
        self._pulse = self._listen(zmq.PULL, self.addresses.pulse)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[FromEngine], None] | None = None
        self._connected = {"pair": False, "pulse": False}

    def attach(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[FromEngine], None]) -> None:
        """Call `on_message` on `loop` for every message from now on, heartbeats among them."""
        self._loop, self._on_message = loop, on_message
        for socket in (self._pair, self._pulse):
            loop.add_reader(socket.fileno(), self.drain)
        # the descriptor tells of changes only: what has come before must be read now
        loop.call_soon(self.drain)

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine; dropped where none is connected (not yet, or no more)."""
        if self._pair.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._pair.send(encode(message), zmq.NOBLOCK)
        if self._loop is not None and not self._loop.is_closed():
            # sending may take the readiness signal of an incoming message with it
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Handle everything that has come."""
        if self._pair.closed or self._on_message is None:
            return
        for name, socket in (("pair", self._pair), ("pulse", self._pulse)):
            while not socket.closed:
                try:
                    data = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if not self._connected[name]:
                    self._note_connected(name)
                self._on_message(decode_from_engine(data))

    def close(self) -> None:
        """Close the sockets and remove the folder. Unsent messages are dropped."""
        if self._pair.closed:
            return
        for socket in (self._pair, self._pulse):
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(socket.fileno())
            socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(address)
        return socket

    def _note_connected(self, name: str) -> None:
        self._connected[name] = True
        if all(self._connected.values()):
            shutil.rmtree(self._folder, ignore_errors=True)


class EngineChannel:
    """The engine's end of the pair. Blocking; used by the loop's thread alone."""

    def __init__(self, addresses: Addresses) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(addresses.pair)

    def receive(self, timeout: float | None) -> list[ToEngine]:
        """See EngineSide."""
        messages: list[ToEngine] = []
        if timeout != 0.0 and not self._socket.poll(None if timeout is None else max(1, int(timeout * 1000))):
            return messages
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(decode_to_engine(self._socket.recv(zmq.NOBLOCK)))
        return messages

    def send(self, message: FromEngine) -> None:
        """See EngineSide."""
        self._socket.send(encode(message))

    def close(self) -> None:
        """Deliver what was sent, then close."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()


class PulseSender:
    """Sends heartbeats, and the failure of an engine that hangs. Made and used by one thread of the engine process."""

    def __init__(self, addresses: Addresses) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(addresses.pulse)

    def send(self, message: Heartbeat | Failure) -> None:
        """Send, or drop it while nobody reads."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Close; a heartbeat under way may be lost."""
        self._socket.close(linger=0)
        self._context.term()


class MemoryChannel:
    """Both ends within one process: the engine's loop runs on a thread, the front end on an event loop."""

    def __init__(self) -> None:
        self._to_engine: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[FromEngine], None] | None = None

    def attach(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[FromEngine], None]) -> None:
        """Call `on_message` on `loop` for every message of the engine. To be called before the engine starts."""
        self._loop, self._on_message = loop, on_message

    def tell(self, message: ToEngine) -> None:
        """Queue a message for the engine."""
        self._to_engine.put(message)

    def receive(self, timeout: float | None) -> list[ToEngine]:
        """See EngineSide."""
        messages: list[ToEngine] = []
        with contextlib.suppress(queue.Empty):
            if timeout != 0.0:
                messages.append(self._to_engine.get(timeout=timeout))
            while True:
                messages.append(self._to_engine.get_nowait())
        return messages

    def send(self, message: FromEngine) -> None:
        """See EngineSide."""
        if self._loop is not None and self._on_message is not None and not self._loop.is_closed():
            # a loop that closes meanwhile has no reader left to tell
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_message, message)
