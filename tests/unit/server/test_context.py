"""What is counted around a request: an answer is counted when its last byte leaves, not when its task ends."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from hardpoint.server.context import ContextMiddleware


class Counts:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append((method, status))


def ask(app: Any) -> tuple[Counts, list[int]]:
    """One request; what was counted, and how much of it when each message left."""
    counts, by_message = Counts(), []

    async def send(message: Message) -> None:
        by_message.append(len(counts.seen))

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    asyncio.run(ContextMiddleware(app, counts, log_requests=False)(scope, receive, send))  # type: ignore[arg-type]
    return counts, by_message


def test_a_stream_is_counted_once_and_before_its_end_is_sent() -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    counts, by_message = ask(stream)
    assert counts.seen == [("GET", 200)]
    assert by_message == [0, 0, 1]


def test_a_client_that_left_before_an_answer_is_counted_as_such() -> None:
    async def gone(scope: Scope, receive: Receive, send: Send) -> None:
        return

    assert ask(gone)[0].seen == [("GET", 499)]


def test_a_failure_is_counted_with_the_status_that_was_sent() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no")

    assert ask(broken)[0].seen == [("GET", 500)]
