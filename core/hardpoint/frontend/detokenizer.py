"""Token ids become text, piece by piece, exactly: the joined pieces are decode(prompt + output) less decode(prompt).

Tokens are not decoded one by one: a character may be spread over several, and decoders treat the start of a sequence
specially (a leading space is dropped). So a short window is decoded, and what the last push already knew is cut off:

    ids      ... | prefix ... | pending ...
                 ^start       ^read
    text         | known      | new text, given out once it ends in a whole character

`prefix` holds the tokens behind the piece given out last; it always has text, unless nothing has any yet. Both parts
stay a few tokens long, so the cost of a token does not depend on the length of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hardpoint.request.sampling import SamplingParams

#: What decoders put for bytes that are no character (yet).
REPLACEMENT = "\ufffd"
#: An unfinished character has at most three bytes: in a longer run most marks are meant or will stay.
MAX_PENDING = 8
#: How far back in the prompt to look first; doubled until there is text.
CONTEXT_TOKENS = 6


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens."""


class Detokenizer:
    """Incremental text of one sequence. Owned by the sequence; `push` in order, `flush` once."""

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._ids, self._known = self._context(prompt_ids)
        self._read = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that these tokens complete; never half a character."""
        ids = self._ids
        ids.extend(token_ids)
        text = self._decode(ids)
        if text == self._known:
            self._forget_silent()
            return ""
        if text.endswith(REPLACEMENT):
            return self._before_unfinished(text, max(self._read, len(ids) - len(token_ids)))
        return self._give_out(text, len(ids))

    def flush(self) -> str:
        """What is left at the end. An unfinished character comes as the replacement mark."""
        if len(self._ids) == self._read:
            return ""
        return self._give_out(self._decode(self._ids), len(self._ids))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """The shortest end of the prompt, from a few tokens on, that has text of its own; and this text."""
        size = CONTEXT_TOKENS
        while True:
            ids = list(prompt[-size:])
            text = self._decode(ids) if ids else ""
            if text.rstrip(REPLACEMENT) or size >= len(prompt):
                return ids, text
            size *= 2

    def _new_text(self, text: str, pending: Sequence[int]) -> str:
        """`text` of the window less what was known of it."""
        known = self._known
        if text.startswith(known):
            return text[len(known) :]
        # the prompt ended inside a character that is whole now: give it once, and nothing that stands before it
        settled = known.rstrip(REPLACEMENT)
        if text.startswith(settled):
            return text[len(settled) :]
        return self._decode(pending)

    def _give_out(self, text: str, end: int) -> str:
        """Return the window's new text up to token `end`, and let the window begin with the tokens behind it."""
        pending = self._ids[self._read : end]
        new = self._new_text(text, pending)
        if new:
            del self._ids[: self._read]
            self._read = len(pending)
            self._known = self._decode(pending)
        else:
            self._read = end
            self._known = text
        return new

    def _forget_silent(self) -> None:
        """Tokens without text (special ones) stay pending, or the window could lose its text; a long run is dropped."""
        pending = self._ids[self._read :]
        if len(pending) > MAX_PENDING:
            # doubled, because a space mark alone may be silent only at the start of a sequence
            self._ids[self._read :] = [token for token in pending if self._decode([token, token])]

    def _before_unfinished(self, text: str, first: int) -> str:
        """Give out what stands before an unfinished character. Cuts up to token `first` have been tried already."""
        ids, end = self._ids, len(self._ids)
        for cut in range(end - 1, max(end - 4, first), -1):
            head = self._decode(ids[:cut])
            if not head.endswith(REPLACEMENT):
                return self._give_out(head, cut)
        if end - self._read <= MAX_PENDING:
            return ""
        # marks that are meant or will stay: give out those that later tokens cannot change
        for cut in range(end - 1, max(end - 4, self._read), -1):
            head, tail = self._decode(ids[:cut]), self._decode(ids[cut:])
            if head + tail == text:
                return self._give_out(head, cut)
        return self._give_out(text, end)
