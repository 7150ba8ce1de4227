"""Clients that go away (S-20): their pages come back, the engine stops working for them, neighbours notice nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from contextlib import ExitStack

import psutil
import pytest
from server_process import ServerProcess, neighbour, open_stream, send_raw, wait_until

pytestmark = pytest.mark.server

LONG = {"max_tokens": 4000, "ignore_eos": True}
#: Seconds until an abandoned request must be gone; what is wanted is one.
SOON = 15.0


def test_32_streaming_clients_with_random_aborts(server: ServerProcess) -> None:
    before = server.load()
    draw = random.Random(7)
    prompts = [[draw.randrange(2, 300) for _ in range(draw.randint(1, 90))] for _ in range(32)]
    limits = [draw.choice([None, None, 0, 1, 5, 20]) for _ in range(32)]
    alone = {i: server.complete(prompts[i], max_tokens=60)["choices"][0]["text"] for i in range(0, 32, 3)}
    limits = [None if i in alone else limits[i] for i in range(32)]

    async def scenario() -> list[str]:
        async with server.async_client() as client:

            async def ask(number: int) -> str:
                arguments = {"model": "tiny", "prompt": prompts[number], "temperature": 0, "max_tokens": 60}
                if limits[number] is not None:
                    arguments |= {"max_tokens": 3000, "extra_body": {"ignore_eos": True}, "n": 1 + number % 3}
                text, chunks = "", 0
                async with await client.completions.create(stream=True, **arguments) as stream:
                    async for chunk in stream:
                        text += chunk.choices[0].text
                        chunks += 1
                        if limits[number] is not None and chunks > limits[number]:
                            break
                return text

            return await asyncio.gather(*(ask(number) for number in range(32)))

    texts = asyncio.run(scenario())
    assert {number: texts[number] for number in alone} == alone
    server.wait_idle(SOON)
    assert server.load() == before
    assert_whole_pool(server)


def test_30_requests_that_are_left_behind(server: ServerProcess) -> None:
    """Streams, whole answers and n = 4; some left before the first byte, some while still queued."""
    gone_before = server.metrics()["hardpoint:client_disconnects_total"]
    with neighbour(server), ExitStack() as connections:
        for number in range(30):
            body = {"prompt": [10 + number, 20, 30], "temperature": 0, **LONG}
            body |= ({"stream": True}, {}, {"n": 4})[number % 3]
            connection = send_raw(server, "/v1/completions", body)
            connections.callback(connection.close)
            if number % 5 == 0:
                connection.close()
        wait_until(lambda: server.load()[0] + server.load()[1] > 20)
        time.sleep(0.2)
    server.wait_idle(SOON)
    assert server.metrics()["hardpoint:client_disconnects_total"] - gone_before == 30
    assert_no_work(server)
    assert_whole_pool(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: ServerProcess, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": 2, **LONG}
    connection = send_raw(server, "/v1/chat/completions", body)
    wait_until(lambda: server.load()[0] == 2 and server.load()[2] >= 6)
    connection.close()
    server.wait_idle(SOON)
    assert_no_work(server)


def test_a_client_that_does_not_read(server: ServerProcess) -> None:
    """Its own answer waits for it, but nobody else's does; when it leaves, everything is let go."""
    body = {"prompt": [5, 6, 7], "stream": True, "n": 16, "max_tokens": 240, "ignore_eos": True, "logprobs": 20}
    connection = send_raw(server, "/v1/completions", body)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wait_until(lambda: server.load()[0] > 0)
    assert server.complete([9, 9], max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20
    connection.close()
    server.wait_idle(SOON)


def test_abort_by_id(server: ServerProcess) -> None:
    with open_stream(server, request_id="end-me", **LONG) as lines:
        answer = server.http.post("/abort_requests", json={"request_ids": ["end-me", "nobody"]})
        assert answer.json() == {"aborted": ["end-me"]}
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "abort"


def assert_no_work(server: ServerProcess) -> None:
    """The engine draws nothing more: it counts steps, and CPU time shows loops that do not."""
    steps = server.metrics()["hardpoint:engine_steps_total"]
    before = _cpu(server.engine)
    time.sleep(0.5)
    assert server.metrics()["hardpoint:engine_steps_total"] == steps
    assert _cpu(server.engine) - before < 0.25


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def assert_whole_pool(server: ServerProcess) -> None:
    """A single request gets 97 % of all pages."""
    total = server.metrics()["hardpoint:kv_pages_total"]
    answer = server.complete([3 + i % 290 for i in range(4060)], max_tokens=36, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 4096 >= 0.95 * 16 * total
    assert answer["choices"][0]["finish_reason"] == "length"
    server.wait_idle(SOON)
