"""SIGTERM and SIGINT (S-37): running streams, new requests, exit codes, processes and the port afterwards."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, open_stream, wait_until

pytestmark = pytest.mark.server

FLAGS = ("--num-kv-pages", "600", "--served-model-name", "tiny")


def finish_reason(line: str) -> str | None:
    """Of one event."""
    return json.loads(line[6:])["choices"][0]["finish_reason"]


def is_draining(server: ServerProcess) -> bool:
    return httpx.get(f"{server.url}/ready").status_code == 503


def assert_port_is_free(server: ServerProcess) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_drain(make_server: Callable[..., ServerProcess], tiny_folder: Path) -> None:
    server = make_server(tiny_folder, *FLAGS, "--drain-timeout", "100")
    expected = server.complete([5, 6, 7], max_tokens=1200, ignore_eos=True)["choices"][0]["text"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1200}
    with (
        open_stream(server, max_tokens=1200) as lines,
        open_stream(server, "/v1/chat/completions", **chat) as others,
    ):
        server.send(signal.SIGTERM)
        wait_until(lambda: is_draining(server))
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "late"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "not_ready"
        assert refused.headers["retry-after"]
        rest, other = list(lines), list(others)
    assert (rest[-1], other[-1]) == ("data: [DONE]", "data: [DONE]")
    assert (finish_reason(rest[-2]), finish_reason(other[-2])) == ("length", "length")
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest[:-1])
    assert expected.endswith(text)
    assert len(text) > 1000
    assert server.end() == 0
    assert_port_is_free(server)


def test_drain_0(make_server: Callable[..., ServerProcess], tiny_folder: Path) -> None:
    server = make_server(tiny_folder, *FLAGS, "--drain-timeout", "0")
    with open_stream(server, max_tokens=4000) as lines:
        server.send(signal.SIGTERM)
        rest = list(lines)
    assert json.loads(rest[-2][6:])["error"]["type"] == "service_unavailable_error"
    assert rest[-1] == "data: [DONE]"
    assert server.end() == 0
    assert_port_is_free(server)


def test_a_second_signal(make_server: Callable[..., ServerProcess], tiny_folder: Path) -> None:
    """It does not wait for the drain time, nor for a client that reads nothing."""
    server = make_server(tiny_folder, *FLAGS, "--drain-timeout", "1000")
    with open_stream(server, max_tokens=4000) as lines, open_stream(server, n=8, max_tokens=4000, logprobs=20):
        server.send(signal.SIGTERM)
        wait_until(lambda: is_draining(server))
        server.send(signal.SIGINT)
        signalled = time.monotonic()
        rest = list(lines)
        assert "error" in json.loads(rest[-2][6:])
        assert server.end() == 128 + signal.SIGINT
        assert time.monotonic() - signalled < 30  # the drain time is 1000 s
    assert_port_is_free(server)


def test_a_signal_while_loading(make_server: Callable[..., ServerProcess], tiny_folder: Path) -> None:
    """Nothing runs yet: it ends, and the half-started engine with it."""
    server = make_server(tiny_folder, *FLAGS, wait=False)
    wait_until(lambda: len(server.main.children()) == 1)
    server._family = server.main.children()
    time.sleep(0.5)
    server.send(signal.SIGTERM)
    code = server.end()
    assert code in (0, -signal.SIGTERM, 128 + signal.SIGTERM), server.output()
    assert "Traceback" not in server.output()
