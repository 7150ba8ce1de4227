"""The load generator against small servers of our own, in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hardpoint.bench.datasets import PromptSettings
from hardpoint.bench.load import LoadError, LoadGenerator, Target, fetch_json
from hardpoint.bench.serving import ServingSettings, request_body, served_model
from hardpoint.errors import ConfigError

Write = Callable[[bytes], Awaitable[None]]


class Server:
    """Answers each request with `answer(body, write)`; counts how many run at once."""

    def __init__(self, answer: Callable[[Any, Write], Awaitable[None]]) -> None:
        self._answer = answer
        self.running = self.most = self.total = 0
        self.heads: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length)) if length else None
        self.running += 1
        self.total += 1
        self.most = max(self.most, self.running)

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            await self._answer(body, write)
        finally:
            self.running -= 1
            writer.close()


@asynccontextmanager
async def serving(answer: Callable[[Any, Write], Awaitable[None]]) -> AsyncIterator[tuple[Server, Target]]:
    server = Server(answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with listener:
        yield server, Target("127.0.0.1", listener.sockets[0].getsockname()[1])


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return b"data: " + json.dumps({"choices": [], "usage": counts}, separators=(",", ":")).encode() + b"\n\n"


async def good(body: Any, write: Write) -> None:
    await write(STREAM)
    for index in range(3):
        await write(chunk(event(f"t{index}")))
        await asyncio.sleep(0.001)
    await write(chunk(usage(7, 5)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def test_a_stream_is_timed_and_counted() -> None:
    async def scenario() -> None:
        async with serving(good) as (server, target):
            (record,) = await LoadGenerator(target).closed_loop([{"prompt": [1]}], 1)
            assert record.error is None
            assert len(record.events) == 3
            assert record.start <= record.events[0] <= record.events[-1] <= record.end
            assert (record.prompt_tokens, record.output_tokens) == (7, 5)
            assert server.total == 1

    asyncio.run(scenario())


def test_events_cut_anywhere_are_counted_once() -> None:
    stream = STREAM + chunk(event("a") + event("bb")) + chunk(usage(1, 2)) + b"0\r\n\r\n"

    async def scenario() -> None:
        for cut in range(len(STREAM), len(stream), 7):

            async def answer(body: Any, write: Write, cut: int = cut) -> None:
                await write(stream[:cut])
                await asyncio.sleep(0)
                await write(stream[cut:])

            async with serving(answer) as (_, target):
                record = await LoadGenerator(target).send(b"{}")
                assert (len(record.events), record.output_tokens, record.error) == (2, 2, None), cut

    asyncio.run(scenario())


def test_closed_loop_keeps_its_concurrency() -> None:
    async def scenario() -> None:
        async with serving(good) as (server, target):
            done: list[None] = []
            records = await LoadGenerator(target).closed_loop([{}] * 12, 3, lambda: done.append(None))
            assert len(records) == len(done) == 12
            assert server.most == 3

    asyncio.run(scenario())


def test_open_loop_does_not_wait_for_answers() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def answer(body: Any, write: Write) -> None:
            await release.wait()
            await good(body, write)

        async with serving(answer) as (server, target):
            running = asyncio.create_task(LoadGenerator(target).open_loop([{}] * 5, rate=2000.0))
            async with asyncio.timeout(10):
                while server.most < 5:  # all five arrive although none is answered
                    await asyncio.sleep(0.001)
            release.set()
            records = await running
            assert [record.error for record in records] == [None] * 5
            starts = [record.start for record in records]
            assert starts[0] == 0.0
            assert starts == sorted(starts)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (b"what?\r\n\r\n", "not HTTP"),
        (STREAM + chunk(event("a")), "closed the connection in the middle"),
        (STREAM + chunk(b'data: {"error":{"message":"gone"}}\n\n') + b"0\r\n\r\n", "gone"),
    ],
)
def test_failures_are_records(answer: bytes, message: str) -> None:
    async def scenario() -> None:
        async def respond(body: Any, write: Write) -> None:
            await write(answer)

        async with serving(respond) as (_, target):
            record = await LoadGenerator(target).send(b"{}")
            assert record.error is not None
            assert message in record.error

    asyncio.run(scenario())


def test_timeouts_and_absent_servers_are_records() -> None:
    async def scenario() -> None:
        async def never(body: Any, write: Write) -> None:
            await asyncio.sleep(60)

        async with serving(never) as (_, target):
            record = await LoadGenerator(target, timeout=0.05).send(b"{}")
            assert record.error == "no complete answer within 0.05 s"
        assert (await LoadGenerator(target).send(b"{}")).error is not None  # its port is closed now
        with pytest.raises(LoadError, match="cannot be reached"):
            await fetch_json(target, "/v1/models")

    asyncio.run(scenario())


def test_the_key_is_sent_and_the_model_is_asked_for() -> None:
    async def scenario() -> None:
        async def models(body: Any, write: Write) -> None:
            await write(b'HTTP/1.1 200 OK\r\ncontent-length: 23\r\n\r\n{"data": [{"id": "m"}]}')

        async with serving(models) as (server, target):
            keyed = Target(target.host, target.port, api_key="secret")
            assert await served_model(keyed) == "m"
            assert "Authorization: Bearer secret" in server.heads[0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("http://localhost:8000/v1/", Target("localhost", 8000)),
        ("https://a.example/proxy/v1", Target("a.example", 443, "/proxy", True)),
    ],
)
def test_addresses(url: str, expected: Target) -> None:
    assert Target.parse(url) == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://h:99999"])
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(ConfigError):
        Target.parse(url)


def test_bodies_fix_the_length() -> None:
    settings = ServingSettings(Target("h", 1), output_len=9, prompts=PromptSettings())
    body = request_body("m", [1, 2], settings)
    assert body["max_tokens"] == body["min_tokens"] == 9
    assert body["ignore_eos"]
    assert body["stream"]
