"""The engine process is killed or stopped (S-21): probes, streams, new requests, exit code, bookkeeping."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, open_stream, wait_until

pytestmark = pytest.mark.server

FLAGS = ("--num-kv-pages", "264", "--health-timeout", "3", "--served-model-name", "tiny")


def status(server: ServerProcess, path: str = "/health") -> int:
    """0 when nobody listens any more."""
    try:
        return server.http.get(path).status_code
    except httpx.TransportError:
        return 0


def test_killed_while_idle(make_server: Callable[..., ServerProcess], tiny_folder: Path) -> None:
    server = make_server(tiny_folder, *FLAGS)
    assert status(server) == 200
    server.engine.kill()
    seen: list[int] = []

    def refused() -> bool:
        seen.append(status(server))
        return seen[-1] != 200

    wait_until(refused, timeout=10)
    assert seen[-1] == 503, "the end came before any probe could see it"
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": []})):
        try:
            answer = server.http.post(path, json=body)
        except httpx.TransportError:
            continue
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
    assert server.end() == 1
    assert "SIGKILL" in server.output()


def test_stopped_then_killed_while_busy(make_server: Callable[..., ServerProcess], tiny_folder: Path) -> None:
    server = make_server(tiny_folder, *FLAGS)
    prompt = [8, 9, 10]
    expected = server.complete(prompt, max_tokens=800, ignore_eos=True)["choices"][0]["token_ids"]
    with open_stream(server, prompt=prompt, max_tokens=800, return_token_ids=True) as lines:
        server.engine.send_signal(signal.SIGSTOP)
        wait_until(lambda: status(server) == 503)
        assert "no sign of life" in server.http.get("/health").json()["error"]["message"]
        assert status(server, "/live") == 200
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        server.engine.send_signal(signal.SIGCONT)
        wait_until(lambda: status(server) == 200)
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    found = [id for line in rest[:-1] for id in json.loads(line[6:])["choices"][0]["token_ids"]]
    assert found == expected[len(expected) - len(found) :]
    server.wait_idle()

    answers: list[httpx.Response] = []
    body = {"prompt": [4, 5], "max_tokens": 4000, "ignore_eos": True}
    threads = [
        threading.Thread(target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body)))
        for _ in range(3)
    ]
    with open_stream(server, max_tokens=4000) as lines, open_stream(server, n=3, max_tokens=4000) as others:
        for thread in threads:
            thread.start()
        wait_until(lambda: server.load()[0] == 7)
        server.engine.kill()
        killed = time.monotonic()
        for stream in (lines, others):
            rest = list(stream)
            assert json.loads(rest[-2][6:])["error"]["code"] == "engine_dead"
            assert rest[-1] == "data: [DONE]"
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - killed < 20  # not one of the client's own time-outs
    assert [answer.status_code for answer in answers] == [503] * 3
    assert {answer.json()["error"]["code"] for answer in answers} == {"engine_dead"}
    assert server.end() == 1


def test_the_engine_goes_with_the_front_end(make_server: Callable[..., ServerProcess], tiny_folder: Path) -> None:
    server = make_server(tiny_folder, *FLAGS)
    with open_stream(server, max_tokens=4000):
        server.process.kill()
        assert server.end() == -signal.SIGKILL  # `end` looks for what is left behind
