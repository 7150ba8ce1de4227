"""A load generator for a streaming HTTP server: asyncio sockets and a C parser, so that it takes little of the machine
it measures. Closed loop (so many clients, each with one request at a time) or open loop (arrivals of a Poisson process,
which do not wait for the server, as users do not).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from hardpoint.errors import ConfigError
from hardpoint_platforms.errors import HardpointError


class LoadError(HardpointError):
    """The server under test cannot be reached or answers nonsense."""


@dataclass(frozen=True)
class Target:
    """Where requests go. `base` is the path before "/v1" (mostly empty)."""

    host: str
    port: int
    base: str = ""
    tls: bool = False
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """Read "http://127.0.0.1:8000", with or without "/v1" at its end. Raises ConfigError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r} is no address", hint="write it like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), base, tls, api_key)

    @property
    def url(self) -> str:
        """Written out again."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.base}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of one HTTP/1.1 request that closes its connection."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"{method} {self.base}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True)
class Record:
    """One request, in seconds since the start of the run.

    Attributes:
        start: when it was sent (open loop: when it was due).
        events: when each piece of the stream came.
        end: when it was over.
        prompt_tokens, output_tokens: as the server's usage says.
        error: None where all went well.
    """

    start: float
    events: tuple[float, ...]
    end: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class _StreamProtocol(asyncio.Protocol):
    """Sends one request, notes the time of each server-sent event, keeps the last events for the usage."""

    def __init__(self, request: bytes, clock: Callable[[], float], done: asyncio.Future[None]) -> None:
        self._request, self._clock, self._done = request, clock, done
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0
        self.events: list[float] = []
        self.last: bytes = b""
        self.usage: bytes = b""
        self.body = b""
        self.status = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(LoadError(f"the server's answer is not HTTP: {error}"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self.status != 200:
            self.body += data
            return
        *complete, self._rest = (self._rest + data).split(b"\n\n")
        for event in complete:
            if not event.startswith(b"data:") or event.endswith(b"[DONE]"):
                continue
            self.last = event
            if b'"usage":{' in event or b'"usage": {' in event:
                self.usage = event
            if b'"choices":[]' not in event and b'"choices": []' not in event:
                self.events.append(self._now)

    def on_message_complete(self) -> None:
        self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(LoadError("the server closed the connection in the middle of an answer"))

    def _finish(self, error: Exception | None) -> None:
        if not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)
        self._transport.close()


class LoadGenerator:
    """Sends bodies to one path of a target and records what comes back."""

    def __init__(self, target: Target, path: str = "/v1/completions", timeout: float = 600.0) -> None:
        self.target, self.path, self.timeout = target, path, timeout
        self._origin = time.perf_counter()
        self._tls = ssl.create_default_context() if target.tls else None

    async def closed_loop(
        self, bodies: Sequence[dict[str, Any]], concurrency: int, on_done: Callable[[], None] | None = None
    ) -> list[Record]:
        """Keep `concurrency` requests under way until all bodies were sent. Records come in the bodies' order."""
        queue = iter(enumerate([json.dumps(body).encode() for body in bodies]))
        records: dict[int, Record] = {}
        self._origin = time.perf_counter()

        async def client() -> None:
            for index, body in queue:
                records[index] = await self.send(body)
                if on_done is not None:
                    on_done()

        await asyncio.gather(*(client() for _ in range(min(concurrency, len(bodies)))))
        return [records[index] for index in range(len(bodies))]

    async def open_loop(
        self,
        bodies: Sequence[dict[str, Any]],
        rate: float,
        seed: int = 0,
        on_done: Callable[[], None] | None = None,
    ) -> list[Record]:
        """Send `rate` requests per second on average, at exponentially distributed distances."""
        draw = random.Random(seed)
        encoded = [json.dumps(body).encode() for body in bodies]
        due, times = 0.0, []
        for _ in encoded:
            times.append(due)
            due += draw.expovariate(rate)
        self._origin = time.perf_counter()

        async def request(at: float, body: bytes) -> Record:
            await asyncio.sleep(max(0.0, at - self._clock()))
            record = await self.send(body, due=at)
            if on_done is not None:
                on_done()
            return record

        return list(await asyncio.gather(*(request(at, body) for at, body in zip(times, encoded, strict=True))))

    async def send(self, body: bytes, due: float | None = None) -> Record:
        """One request. Never raises for what the server does: the record's `error` says it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        message = self.target.request("POST", self.path, body)
        start = self._clock() if due is None else due
        protocol = _StreamProtocol(message, self._clock, done)
        transport: asyncio.BaseTransport | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self.timeout):
                transport, _ = await loop.create_connection(
                    lambda: protocol, self.target.host, self.target.port, ssl=self._tls
                )
                await done
        except TimeoutError:
            error = f"no complete answer within {self.timeout:g} s"
        except (OSError, LoadError) as problem:
            error = str(problem)
        finally:
            if transport is not None:
                transport.close()
        return _record(protocol, start, self._clock(), error)

    def _clock(self) -> float:
        return time.perf_counter() - self._origin


def _record(protocol: _StreamProtocol, start: float, end: float, error: str | None) -> Record:
    prompt_tokens, output_tokens = 0, len(protocol.events)
    if error is None and protocol.status != 200:
        error = f"HTTP {protocol.status}: {protocol.body[:300].decode(errors='replace')}"
    elif error is None and protocol.last.startswith(b'data: {"error"'):
        error = protocol.last[6:306].decode(errors="replace")
    if protocol.usage:
        usage = json.loads(protocol.usage[5:])["usage"]
        prompt_tokens, output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return Record(start, tuple(protocol.events), end, prompt_tokens, output_tokens, error)


async def fetch_json(target: Target, path: str, timeout: float = 10.0) -> Any:
    """GET a JSON document. Raises LoadError."""
    context = ssl.create_default_context() if target.tls else None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
            writer.write(target.request("GET", path))
            answer = await reader.read()
            writer.close()
    except (OSError, TimeoutError) as error:
        reason = os.strerror(error.errno) if error.errno else str(error) or "no answer in time"
        raise LoadError(
            f"{target.url} cannot be reached: {reason}",
            hint="is the server running?",
        ) from error
    head, _, body = answer.partition(b"\r\n\r\n")
    status_line = head.partition(b"\r\n")[0].decode(errors="replace")
    if status_line.split(" ")[1:2] != ["200"]:
        raise LoadError(f"GET {target.url}{path}: {status_line or 'no answer'}")
    try:
        return json.loads(body)
    except ValueError as error:
        raise LoadError(f"GET {target.url}{path}: the answer is not JSON") from error
