"""From bytes to a checked request: one strict reader for every POST route.

Rules, the same everywhere:
- UTF-8 JSON, one value, nothing after it; at most `MAX_DEPTH` levels, `MAX_VALUES` values and `MAX_MEMBERS` keys.
- Of equal keys the last one counts. Unknown keys are ignored. `null` means "not given".
- No conversion: a string, a boolean or a number with a decimal point where an integer belongs is refused
  (an integer where a float belongs is fine). NaN and Infinity are refused.

The depth is checked before parsing, because a parser recurses. Both run in slices of C calls, so that a thread doing
this for a large body keeps the event loop waiting for milliseconds at most.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec

from hardpoint.errors import RequestError

MAX_DEPTH = 100
#: Commas and brackets outside strings, which bounds how long parsing holds the interpreter.
MAX_VALUES = 1 << 20
#: Colons outside strings: keys cost more than values do.
MAX_MEMBERS = 1 << 17
#: Larger bodies are checked and parsed in a thread.
INLINE_BYTES = 64 * 1024

_BLOCK = 1 << 20
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},:"))
_PATH = re.compile(r" - at `(key in )?\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]+)`")
_BYTE = re.compile(r"\(byte (\d+)\)")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]', re.DOTALL)
#: A pair of escaped surrogates, one that is alone (group 1), or any other escape.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_NOT_FINITE = re.compile(rb"(NaN|nan|Infinity|inf)")

T = TypeVar("T")


async def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Check and decode a request body; large ones in a thread.

    Raises RequestError, with the field's path where there is one.
    """
    if len(body) <= INLINE_BYTES:
        return parse(body, decoder)
    return await asyncio.to_thread(parse, body, decoder)


def parse(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Check and decode a request body. Raises RequestError."""
    if not body.strip():
        raise RequestError("The request body is empty; send a JSON object.")
    check_structure(body)
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RequestError(f"The request body is not UTF-8 (byte {exc.start}).") from None
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _field_error(str(exc)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise _syntax_error(body, str(exc)) from None


def check_structure(body: bytes) -> None:
    """Refuse bodies nested deeper than MAX_DEPTH or holding too many values or keys. Raises RequestError."""
    if (
        body.count(b"[") + body.count(b"{") <= MAX_DEPTH
        and body.count(b",") <= MAX_VALUES
        and body.count(b":") <= MAX_MEMBERS
    ):
        return
    brackets = _structure_outside_strings(body).translate(_AS_SQUARE, b",:")
    # Each pass takes the innermost level away. What can still shrink after MAX_DEPTH passes was deeper.
    for _ in range(MAX_DEPTH):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    if brackets.count(b"[") > MAX_DEPTH or b"[]" in brackets:
        raise RequestError(f"The request body is nested deeper than {MAX_DEPTH} levels.")


def _structure_outside_strings(body: bytes) -> bytes:
    """Brackets, commas and colons of `body` that are not inside a string."""
    kept: list[bytes] = []
    size = members = 0
    in_string = False
    position = 0
    while position < len(body):
        block = body[position : position + _BLOCK]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:  # do not part a backslash from what it escapes
            block = body[position : position + len(block) + 1]
        position += len(block)
        parts = block.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        structure = b"".join(parts[1 if in_string else 0 :: 2]).translate(None, _NOT_STRUCTURE)
        if len(parts) % 2 == 0:
            in_string = not in_string
        members += structure.count(b":")
        size += len(structure)
        if size - members > MAX_VALUES:
            raise RequestError(f"The request body holds more than {MAX_VALUES} JSON values.")
        if members > MAX_MEMBERS:
            raise RequestError(f"The request body's objects hold more than {MAX_MEMBERS} keys.")
        kept.append(structure)
    return b"".join(kept)


def _field_error(text: str) -> RequestError:
    """A message of the decoder with its path turned into the request's own spelling: messages[0].content."""
    found = _PATH.search(text)
    path = found.group(2) if found else ""
    message = text[: found.start()] if found else text
    missing = _MISSING.search(message)
    if missing:
        field = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return RequestError(f"Field '{field}' is required.", field=field)
    message = message.replace(" | null", "").replace("`", "")
    if not path:
        return RequestError(f"The request body must be a JSON object: {message[0].lower()}{message[1:]}.")
    path = path.replace("[...]", "")
    return RequestError(f"Field '{path}': {message[0].lower()}{message[1:]}.", field=path)


def _syntax_error(body: bytes, text: str) -> RequestError:
    """A message for bytes that are not JSON. NaN, Infinity and lone surrogates get the name of their field."""
    at = _BYTE.search(text)
    offset = int(at.group(1)) if at else 0
    not_finite = 0 < offset <= INLINE_BYTES and _NOT_FINITE.match(body[offset : offset + 8].lstrip(b"-"))
    if not_finite and (field := _path_at(body, offset)):
        return RequestError(f"Field '{field}': NaN and Infinity are not JSON numbers.", field=field)
    return _lone_surrogate(body) or RequestError(f"The request body is not valid JSON: {text}.")


def _lone_surrogate(body: bytes) -> RequestError | None:
    """A message for a body that would be JSON, were it not for an escaped surrogate without its other half."""
    places = [found.start() for found in _ESCAPE.finditer(body) if found.group(1)]
    if not places:
        return None
    try:
        msgspec.json.decode(_ESCAPE.sub(lambda found: b"?" if found.group(1) else found.group(), body))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    at = places[0]
    field = None
    if at <= INLINE_BYTES:
        text = next(found for found in _TOKEN.finditer(body) if found.end() > at)
        is_key = body[text.end() : text.end() + 64].lstrip().startswith(b":")
        field = _path_at(body, text.start()) if not is_key else None
    what = f"a lone surrogate (\\{body[at + 1 : at + 6].decode()}), which is no Unicode character"
    return RequestError(f"Field '{field}' holds {what}." if field else f"A text holds {what}.", field=field or None)


def _path_at(body: bytes, offset: int) -> str:
    """The field whose value stands at `offset`: messages[0].content. Everything before must be JSON."""
    path: list[str | int] = []
    last = b""
    for found in _TOKEN.finditer(body, 0, offset):
        token = found.group()
        if token in (b"{", b"["):
            path.append("" if token == b"{" else 0)
        elif token in (b"}", b"]"):
            path.pop()
        elif token == b":":
            path[-1] = last[1:-1].decode("utf-8", "replace")[:64]
        elif token == b"," and isinstance(path[-1], int):
            path[-1] += 1
        last = token
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
