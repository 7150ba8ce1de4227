"""Messages to bytes and back: msgpack, with the type of each message in a tag.

Both directions have one decoder that knows its messages, so that a message of the other direction is an error.
The version of the protocol (`PROTOCOL_VERSION`) is compared once, when the engine starts and when it is ready.
"""

from __future__ import annotations

import msgspec

from hardpoint.protocol.messages import PROTOCOL_VERSION, FromEngine, ToEngine

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class ProtocolError(Exception):
    """Bytes that are no message, or two sides of different versions."""


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message as bytes."""
    return _ENCODER.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """A message for the engine. Raises ProtocolError."""
    try:
        return _TO_ENGINE.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a message for the engine: {error}") from error


def decode_from_engine(data: bytes) -> FromEngine:
    """A message for the front end. Raises ProtocolError."""
    try:
        return _FROM_ENGINE.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a message from the engine: {error}") from error


def check_version(other: int) -> None:
    """Raise ProtocolError unless the other side speaks this version."""
    if other != PROTOCOL_VERSION:
        raise ProtocolError(
            f"front end and engine are of different versions (protocol {other}, here {PROTOCOL_VERSION}): "
            "install one version of hardpoint"
        )
