"""Chunks of a stream, built from bytes: everything of a chunk that stays the same is encoded once per request."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.request.output import SequenceDelta
from hardpoint.server.openai.answers import to_json
from hardpoint.server.openai.intake import Head, Tally
from hardpoint.server.openai.schemas import StreamOptions
from hardpoint.server.sse import ChunkWriter


class ChunkFrame(ChunkWriter):
    """Frames choices as events and keeps the stream's usage."""

    def __init__(
        self, head: Head, object_name: str, prompts: Sequence[Sequence[int]], options: StreamOptions | None
    ) -> None:
        fields = {"id": head.id, "object": object_name, "created": head.created, "model": head.model}
        self._head = b"data: " + to_json(fields)[:-1] + b',"choices":['
        self._tally = Tally(prompts)
        self._include_usage = bool(options and options.include_usage)
        self._continuous = self._include_usage and bool(options and options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def count(self, delta: SequenceDelta) -> None:
        """Count a delta's tokens."""
        self._tally.add(delta)

    def frame(self, choice: bytes) -> bytes:
        """One event with one choice, given as JSON."""
        if self._continuous:
            return b"%b%b],%b}\n\n" % (self._head, choice, b'"usage":' + to_json(self._tally.usage()))
        return self._head + choice + self._tail

    def finish(self) -> bytes:
        """The usage event, if it was asked for."""
        if not self._include_usage:
            return b""
        return b'%b],"usage":%b}\n\n' % (self._head, to_json(self._tally.usage()))
