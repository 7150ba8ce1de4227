"""Errors as the client sees them: OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, on every route.

Only errors that Hardpoint raises on purpose are shown in their own words. Anything else is logged with the request id
and answered with a plain 500.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from hardpoint.errors import (
    EngineBusy,
    EngineDead,
    EngineError,
    NotFound,
    PromptTooLong,
    RequestError,
    TooManyRequests,
)
from hardpoint_platforms.errors import HardpointError

#: Seconds after which a client may try again when the server is full, loading or draining.
RETRY_AFTER_S = 2

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class HttpError(RequestError):
    """A request refused for what HTTP itself carries: size, encoding, method, media type."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, field=field)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong. `param` is the request's field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every answer with a status of 400 and above."""

    error: ErrorDetail


def status_of(exc: BaseException) -> int:
    """HTTP status of an exception."""
    if isinstance(exc, (RequestError, EngineError)):
        return exc.status
    return 500


def _code_of(exc: BaseException) -> str | None:
    if isinstance(exc, HttpError):
        return exc.code
    if isinstance(exc, PromptTooLong):
        return "context_length_exceeded"
    if isinstance(exc, TooManyRequests):
        return "overloaded"
    if isinstance(exc, NotFound):
        return "model_not_found" if exc.field == "model" else "not_found"
    if isinstance(exc, EngineBusy):
        return "not_ready"
    if isinstance(exc, EngineDead):
        return "engine_dead"
    return None


def detail_of(exc: BaseException) -> ErrorDetail:
    """The error as data. Exceptions that are not ours give no details away."""
    status = status_of(exc)
    if not isinstance(exc, HardpointError):
        return ErrorDetail("Internal error; the server's log has the details.", "server_error", None, "internal_error")
    message = exc.message if exc.hint is None else f"{exc.message.rstrip('.')}. {exc.hint}"
    param = exc.field if isinstance(exc, RequestError) else None
    return ErrorDetail(message, _TYPES.get(status, "invalid_request_error"), param, _code_of(exc))


def error_json(exc: BaseException) -> bytes:
    """The error body, one line of JSON."""
    return msgspec.json.encode(ErrorBody(detail_of(exc)))


def error_response(exc: BaseException) -> Response:
    """The whole HTTP answer."""
    status = status_of(exc)
    headers = dict(exc.headers) if isinstance(exc, HttpError) else {}
    if isinstance(exc, (EngineBusy, TooManyRequests)):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return Response(error_json(exc), status_code=status, headers=headers, media_type="application/json")
