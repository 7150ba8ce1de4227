"""Reading a request body: size, media type and patience are checked while the bytes come in."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request

from hardpoint.server.errors import ClientGone, HttpError

#: Longest pause between two pieces of a body, seconds.
READ_TIMEOUT_S = 60.0
#: What is read and dropped of a body that is too large, so that the client gets to read the answer.
DISCARD_BYTES = 1 << 30
DISCARD_SECONDS = 20.0


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most `limit` bytes.

    Raises HttpError (408, 413, 415) and ClientGone.
    """
    _check_headers(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        if request.headers.get("expect", "").lower() != "100-continue":
            await _discard(request)
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    while True:
        piece, more = await _next_piece(request)
        size += len(piece)
        if size > limit:
            pieces.clear()
            if more:
                await _discard(request)
            raise _too_large(limit)
        pieces.append(piece)
        if not more:
            return b"".join(pieces)


def _check_headers(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            415,
            f"Content-Encoding {encoding[:32]!r} is not accepted; send the body uncompressed.",
            code="unsupported_content_encoding",
        )
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    # A page in a browser can send other types to a local server without being asked.
    if media and media != "application/json" and not media.endswith("+json"):
        raise HttpError(
            415,
            f"Content-Type {media[:64]!r} is not accepted; send 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )


async def _next_piece(request: Request) -> tuple[bytes, bool]:
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            message = await request.receive()
    except TimeoutError:
        raise HttpError(
            408, f"No part of the body came for {READ_TIMEOUT_S:g} s.", code="timeout", headers={"Connection": "close"}
        ) from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


async def _discard(request: Request) -> None:
    """Read and drop the rest, within bounds."""
    deadline = time.monotonic() + DISCARD_SECONDS
    left = DISCARD_BYTES
    more = True
    while more and left > 0 and time.monotonic() < deadline:
        piece, more = await _next_piece(request)
        left -= len(piece)


def _too_large(limit: int) -> HttpError:
    return HttpError(
        413,
        f"The request body is larger than {limit} bytes, the limit of this server (--max-body-bytes).",
        code="request_too_large",
        headers={"Connection": "close"},
    )
