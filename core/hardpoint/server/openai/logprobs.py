"""Log-probabilities in the shapes of the two APIs.

Text completions: the token strings joined are the text, so a token without a part in the text (end of sequence,
skipped special token) is "". Chat: the `bytes` joined are the text's bytes, so such a token has none. A token that
holds part of a character cannot be a string; text completions write it "bytes:\\xf0\\x9f", chat gives its bytes.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from hardpoint.request.output import PositionLogprobs, SequenceDelta
from hardpoint.request.sampling import SamplingParams
from hardpoint.server.openai.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from hardpoint.server.openai.token_spelling import TokenSpelling, bytes_text

#: JSON has no minus infinity.
LOWEST = -9999.0


def finite(logprob: float) -> float:
    """The value, or LOWEST where JSON could not hold it."""
    return logprob if math.isfinite(logprob) and logprob > LOWEST else LOWEST


def silent_tail(delta: SequenceDelta, params: SamplingParams) -> bool:
    """Whether the delta's last token ended the sequence and has no part in the text."""
    if delta.finish_reason != "stop" or params.include_stop_str_in_output or not delta.token_ids:
        return False
    return not isinstance(delta.stop_reason, str)


def _candidates(spelling: TokenSpelling, position: PositionLogprobs) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, entry in position.items():
        found.setdefault(spelling.text(token), finite(entry.logprob))
    return found


class CompletionLogprobsBuilder:
    """Builds one choice's arrays piece by piece. The pieces joined are the same however the tokens came."""

    def __init__(self, spelling: TokenSpelling, params: SamplingParams) -> None:
        self._spelling = spelling
        self._params = params
        self._hidden = spelling.special_ids if params.skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def echo(
        self, text: str, tokens: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        """Entries of the prompt, whose `text` is given as it was written: each token is found in it again."""
        raw = text.encode("utf-8", "surrogatepass")
        special = self._spelling.special_ids
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        at = offset = 0
        piece = CompletionLogprobs()
        for token, position in zip(tokens, positions, strict=False):
            part = self._spelling.raw(token)
            if not raw.startswith(part, at):
                if part.startswith(b" ") and raw.startswith(part[1:], at):
                    part = part[1:]  # a space that the tokenizer put before the text
                elif token in special:
                    part = b""
            self._append(piece, bytes_text(part), offset, token, position)
            if raw.startswith(part, at):
                at += len(part)
                offset += len(decoder.decode(part))
        self._offset = len(text)
        return piece

    def skip(self, text: str) -> None:
        """Text without entries came first."""
        self._offset += len(text)

    def add(self, delta: SequenceDelta) -> CompletionLogprobs:
        """Entries of a delta's tokens."""
        piece = CompletionLogprobs()
        last = len(delta.token_ids) - 1 if silent_tail(delta, self._params) else -1
        for number, (token, position) in enumerate(zip(delta.token_ids, delta.logprobs or (), strict=False)):
            hidden = number == last or token in self._hidden
            part = b"" if hidden else self._spelling.raw(token)
            self._append(piece, bytes_text(part), self._offset, token, position)
            self._offset += len(self._decoder.decode(part))
        return piece

    def _append(
        self, piece: CompletionLogprobs, text: str, offset: int, token: int, position: PositionLogprobs | None
    ) -> None:
        piece.tokens.append(text)
        piece.text_offset.append(offset)
        piece.token_logprobs.append(None if position is None else finite(position[token].logprob))
        piece.top_logprobs.append(None if position is None else _candidates(self._spelling, position))


def chat_logprobs(spelling: TokenSpelling, delta: SequenceDelta, params: SamplingParams) -> ChatLogprobs:
    """Entries of a delta's tokens, each with the `params.logprobs` likeliest ones."""
    hidden = spelling.special_ids if params.skip_special_tokens else frozenset()
    last = len(delta.token_ids) - 1 if silent_tail(delta, params) else -1
    wanted = params.logprobs or 0
    answer = ChatLogprobs()
    for number, (token, position) in enumerate(zip(delta.token_ids, delta.logprobs or (), strict=False)):
        raw = spelling.raw(token)
        shown = b"" if number == last or token in hidden else raw
        best = sorted(position.items(), key=lambda item: -item[1].logprob)[:wanted] if wanted else []
        top = [_candidate(spelling, other, entry.logprob) for other, entry in best]
        answer.content.append(
            TokenLogprob(raw.decode("utf-8", "replace"), finite(position[token].logprob), list(shown), top)
        )
    return answer


def _candidate(spelling: TokenSpelling, token: int, logprob: float) -> TopLogprob:
    raw = spelling.raw(token)
    return TopLogprob(raw.decode("utf-8", "replace"), finite(logprob), list(raw))


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """Prompt positions as vLLM shows them: token id to logprob, rank and text."""
    return [
        None
        if position is None
        else {
            str(token): {"logprob": finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for token, e in position.items()
        }
        for position in positions
    ]
