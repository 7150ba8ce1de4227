"""Clients that leave, servers that drain, requests that are aborted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hardpoint.errors import EngineBusy

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


class Connection:
    """One ASGI call by hand: what was sent, and a way to hang up."""

    def __init__(self, app: Any, path: str, body: bytes, chunks: list[bytes] | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for part in chunks or [body]:
            self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": True})
        self._incoming.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
            "server": ("test", 80), "client": ("test", 1), "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before_first", [True, False])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_client_that_leaves_aborts_its_request(harness, wait_until, path, stream, before_first) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        steps = 0

        async def pace() -> None:
            nonlocal steps
            steps += 1
            if before_first or steps > 4:
                await gate.wait()

        harness.client.pace = pace
        body = {"messages": USER} if path == CHAT else {"prompt": ["a", "b"], "n": 2}
        call = Connection(harness.app, path, json.dumps({**body, "stream": stream, "max_tokens": 50}).encode())
        await wait_until(lambda: steps > (0 if before_first else 4))
        assert harness.lifecycle.in_flight == 1
        call.hang_up()
        await asyncio.wait_for(call.task, 5)
        assert harness.client.live == 0
        assert len(harness.client.closed_early) == (1 if path == CHAT else 2)
        assert harness.lifecycle.in_flight == 0

    asyncio.run(scenario())
    assert 'hardpoint:client_disconnects_total{engine="0",model_name="tiny"} 1.0' in harness.get("/metrics").text


def test_leaving_while_the_body_comes(harness) -> None:
    async def scenario() -> None:
        call = Connection(harness.app, CHAT, b"")
        call._incoming = asyncio.Queue()
        call.task.cancel()
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": b'{"mess', "more_body": True})
        incoming.put_nowait({"type": "http.disconnect"})
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": [], "root_path": ""}
        await harness.app(scope, incoming.get, call._send)

    asyncio.run(scenario())
    assert harness.client.calls == []


def test_abort_by_any_of_its_names(harness, wait_until) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        harness.client.pace = gate.wait
        async with harness.http() as http:
            for name in ("job-1", "chatcmpl-job-1"):
                headers = {"X-Request-Id": "job-1"}
                waiting = asyncio.create_task(http.post(CHAT, json={"messages": USER}, headers=headers))
                await wait_until(lambda: harness.client.live == 1)
                answer = await http.post("/abort_requests", json={"request_ids": [name, "nobody"]})
                assert answer.json() == {"aborted": [name]}
                gate.set()
                choice = (await waiting).json()["choices"][0]
                assert choice["finish_reason"] == "abort"
                gate.clear()
                harness.client.aborted.clear()

    asyncio.run(scenario())


def test_two_live_requests_with_one_id(harness, wait_until) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        harness.client.pace = gate.wait
        async with harness.http() as http:
            calls = [asyncio.create_task(http.post(TEXT, json={"prompt": "x", "request_id": "same"})) for _ in range(2)]
            await wait_until(lambda: harness.client.live == 2)
            assert len({call["id"] for call in harness.client.calls}) == 2
            gate.set()
            assert {(await call).json()["id"] for call in calls} == {"cmpl-same"}

    asyncio.run(scenario())


def test_draining_lets_running_requests_finish_and_takes_no_new_ones(harness, wait_until) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        harness.client.pace = gate.wait
        async with harness.http() as http:
            running = asyncio.create_task(http.post(CHAT, json={"messages": USER, "stream": True, "max_tokens": 3}))
            await wait_until(lambda: harness.client.live == 1)
            harness.lifecycle.begin_drain()
            refused = await http.post(CHAT, json={"messages": USER})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
            gate.set()
            text = (await running).text
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in text
            assert harness.lifecycle.in_flight == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_stopping_ends_running_requests_with_an_error(harness, wait_until, stream) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        steps = 0

        async def pace() -> None:
            nonlocal steps
            steps += 1
            if steps > 2:
                await gate.wait()

        harness.client.pace = pace
        async with harness.http() as http:
            running = asyncio.create_task(http.post(CHAT, json={"messages": USER, "stream": stream, "max_tokens": 9}))
            await wait_until(lambda: steps > 2)
            harness.lifecycle.stop(EngineBusy("The server is shutting down."))
            answer = await asyncio.wait_for(running, 5)
            if stream:
                last, done = answer.text.split("\n\n")[-3:-1]
                assert json.loads(last.removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
                assert done == "data: [DONE]"
            else:
                assert answer.status_code == 503
            assert harness.client.live == 0

    asyncio.run(scenario())


def test_deltas_that_are_ready_together_are_one_write(harness, wait_until) -> None:
    async def scenario() -> None:
        body = json.dumps({"messages": USER, "stream": True, "max_tokens": 40}).encode()
        call = Connection(harness.app, CHAT, body)
        await asyncio.wait_for(call.task, 5)
        assert call.status == 200
        assert call.text.count('"content":"') == 41
        assert len(call.sent) <= 4

    asyncio.run(scenario())


def test_slow_readers_are_not_waited_for(harness) -> None:
    async def scenario() -> None:
        call = Connection(harness.app, TEXT, b"", chunks=[b'{"pro', b'mpt":"x"', b"}"])
        await asyncio.wait_for(call.task, 5)
        assert call.status == 200

    asyncio.run(scenario())
