"""What happens around every request: an id, a time, a log line, and an answer even to our own mistakes."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.metrics.registry import ServerMetrics
from hardpoint.server.errors import error_response

REQUEST_ID = "hardpoint.request_id"
ARRIVED = "hardpoint.arrived"

_log = logging.getLogger("hardpoint.server")
_access = logging.getLogger("hardpoint.server.access")
_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def plain_id(text: str) -> bool:
    """Whether a text may name a request: 1 to 128 visible ASCII characters."""
    return _PLAIN_ID.fullmatch(text) is not None


def _sent_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if plain_id(text) else None
    return None


class ContextMiddleware:
    """Outermost layer. Puts REQUEST_ID and ARRIVED (time.perf_counter()) into the scope."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, log_requests: bool) -> None:
        self.app = app
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrived = time.perf_counter()
        request_id = _sent_id(scope) or secrets.token_hex(12)
        scope[REQUEST_ID] = request_id
        scope[ARRIVED] = arrived
        header = (b"x-request-id", request_id.encode())
        status, finished = 0, False

        def finish() -> None:
            nonlocal finished
            if not finished:
                finished = True
                self._finish(scope, request_id, status, time.perf_counter() - arrived)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            elif not message.get("more_body", False):
                finish()  # before the last byte leaves: who has the answer finds it counted
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as exc:
            _log.exception("request %s: %s %r failed", request_id, scope["method"], scope["path"])
            if status == 0:
                await error_response(exc)(scope, receive, send_with_id)
        finally:
            finish()

    def _finish(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "none")
        # 499: the client left before there was a status.
        self._metrics.http_request(route, method, status or 499, seconds)
        if self._log_requests:
            _access.info("%s %s %r %d %.3f s", request_id, method, scope["path"], status or 499, seconds)
