"""API keys: `Authorization: Bearer KEY` on every route but the health checks."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from hardpoint.server.errors import HttpError, error_response

#: Routes that probes call without a key. They tell up or down and nothing else.
OPEN_PATHS = frozenset({"/health", "/live", "/ready"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ApiKeyMiddleware:
    """Answers 401 unless one of the keys is shown. Unknown paths are guarded too."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(shown) == 1 and self._opens(shown[0]):
            await self.app(scope, receive, send)
            return
        problem = "is wrong" if shown else "is missing"
        refusal = HttpError(
            401,
            f"The API key {problem}; send the header 'Authorization: Bearer <key>'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(refusal)(scope, receive, send)

    def _opens(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        shown = _digest(key.strip())
        # Every key is compared in full, so that the time tells nothing.
        return bool(sum(hmac.compare_digest(shown, known) for known in self._digests))
