"""A real server process over the scripted client: signals, drain, exit codes, the engine's death."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hardpoint.errors import ConfigError, ModelNotFound
from hardpoint.server.serve import bind, run

SCRIPT = """
import asyncio, importlib.util, sys, threading
spec = importlib.util.spec_from_file_location("fakes", sys.argv[1])
fakes = importlib.util.module_from_spec(spec); spec.loader.exec_module(fakes)
from hardpoint.errors import EngineDead
from hardpoint.server.serve import run
harness = fakes.Harness(port=0, drain_timeout=float(sys.argv[2]))
client = harness.client
client.max_model_len = 100_000
client.pace = lambda: asyncio.sleep(0.02)
from hardpoint.server import serve
listener = serve.bind("127.0.0.1", 0)
def listen():
    for line in sys.stdin:
        if line.strip() == "die":
            client.health = EngineDead("the engine was killed"); client.is_gone = True
            client.fail = client.health
def ready(info):
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=listen, daemon=True).start()
code = run(harness.app, harness.app.state.service.server, listener=listener, on_ready=ready)
print("closed", client.closed, flush=True)
sys.exit(code)
"""
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


class ServerProcess:
    def __init__(self, drain: float) -> None:
        fakes = str(Path(__file__).with_name("conftest.py"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, fakes, str(drain)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def end(self) -> int:
        return self.process.wait(timeout=30)

    def last_words(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()


@pytest.fixture
def start() -> Iterator[Any]:
    servers: list[ServerProcess] = []

    def make(drain: float = 20) -> ServerProcess:
        servers.append(ServerProcess(drain))
        return servers[-1]

    yield make
    for server in servers:
        server.process.kill()
        server.process.wait()
        for pipe in (server.process.stdin, server.process.stdout):
            assert pipe is not None
            pipe.close()


def begin_stream(http: httpx.Client, url: str, tokens: int) -> tuple[Any, Iterator[str]]:
    opened = http.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "max_tokens": tokens})
    lines = opened.__enter__().iter_lines()
    assert "assistant" in next(lines)
    return opened, lines


def test_drain_finishes_streams_and_exits_with_0(start) -> None:
    server = start()
    with httpx.Client(timeout=30) as http:
        _, lines = begin_stream(http, server.url, 60)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while (status := httpx.get(f"{server.url}/ready").status_code) != 503:
            assert time.monotonic() < deadline, status
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
    assert server.end() == 0
    assert server.last_words() == "closed True\n"


def test_drain_of_0_ends_streams_with_an_error_event(start) -> None:
    server = start(drain=0)
    with httpx.Client(timeout=30) as http:
        _, lines = begin_stream(http, server.url, 3_000)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert "service_unavailable_error" in rest[-2]
        assert rest[-1] == "data: [DONE]"
    assert server.end() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_drain(start, second) -> None:
    server = start(drain=600)
    with httpx.Client(timeout=30) as http:
        _, lines = begin_stream(http, server.url, 3_000)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/ready").status_code != 503:
            pass
        server.process.send_signal(second)
        assert "service_unavailable_error" in [line for line in lines if line][-2]
    assert server.end() == 128 + second


def test_idle_server_stops_at_the_first_signal(start) -> None:
    server = start()
    with httpx.Client() as http:
        assert http.get(f"{server.url}/health").status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0


def test_the_engines_death(start) -> None:
    server = start()
    with httpx.Client(timeout=30) as http:
        _, lines = begin_stream(http, server.url, 3_000)
        assert server.process.stdin is not None
        server.process.stdin.write("die\n")
        server.process.stdin.flush()
        while httpx.get(f"{server.url}/health").status_code != 503:
            pass
        assert "engine_dead" in [line for line in lines if line][-2]
    assert server.end() == 1


def test_closed_connections_abort_streams_and_whole_answers(start) -> None:
    server = start()
    host, port = server.url.removeprefix("http://").split(":")
    connections = []
    for stream in (True, False) * 5:
        body = json.dumps({**BODY, "stream": stream, "n": 2, "max_tokens": 2_000}).encode()
        connection = socket.create_connection((host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        connections.append(connection)
    wait_for(server, "vllm:num_requests_running", 10)
    for connection in connections:
        connection.close()
    wait_for(server, "vllm:num_requests_running", 0)
    wait_for(server, "hardpoint:client_disconnects_total", 10)


def wait_for(server: ServerProcess, name: str, value: float) -> None:
    deadline = time.monotonic() + 20
    line = f'{name}{{engine="0",model_name="tiny"}} {value:.1f}'
    while line not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < deadline, line
        time.sleep(0.02)


def test_a_large_body_is_refused_and_does_not_hold_others_up(start) -> None:
    server = start()

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1_000_000

    for content in (b"x" * 100_000_000, pieces()):
        headers = {"Content-Type": "application/json"}
        response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="cannot listen") as refused:
            bind("127.0.0.1", taken.getsockname()[1])
        assert "--port" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="--host"):
        bind("no such host", 1)


def test_a_start_that_fails_is_raised(make_harness) -> None:
    harness = make_harness(port=0)
    harness.client.health = ModelNotFound("no such model", hint="type this")
    with pytest.raises(ModelNotFound, match="no such model"):
        run(harness.app, harness.app.state.service.server)
    assert harness.client.closed
