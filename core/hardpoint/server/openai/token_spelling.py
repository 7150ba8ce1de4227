"""How single tokens are spelled in log-probabilities; remembered, as the same tokens come again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardpoint.frontend.tokenizer import Tokenizer


def bytes_text(raw: bytes) -> str:
    """Bytes as a string; part of a character in the form "bytes:\\xNN"."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TokenSpelling:
    """Bytes and strings of a tokenizer's tokens. Grows to the size of the vocabulary at most."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self.special_ids = frozenset(tokenizer.special_ids)

    def raw(self, token: int) -> bytes:
        """The token's bytes within a text."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._tokenizer.token_bytes(token)
        return found

    def text(self, token: int) -> str:
        """The token's bytes as `bytes_text` writes them."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = bytes_text(self.raw(token))
        return found
