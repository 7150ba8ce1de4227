"""The text side of a running request: what the engine drew becomes what the caller sees.

    TokenOutput -> Detokenizer -> StopMatcher -> SequenceDelta

Used by the streaming clients and by the offline interface alike, so that both give the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hardpoint.frontend.detokenizer import Decoder, Detokenizer
from hardpoint.frontend.stop import StopMatcher
from hardpoint.protocol.messages import TokenLogprobs, TokenOutput
from hardpoint.request.output import Logprob, PositionLogprobs, SequenceDelta
from hardpoint.request.sampling import SamplingParams


class TextTokenizer(Decoder, Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for within a text."""


class TokenTexts:
    """Text of single tokens, for log-probabilities; remembered, as the same tokens come again and again."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
            self._texts[token_id] = text
        return text


class OutputProcessor:
    """Turns the outputs of one request's n sequences into deltas. Owns their text state.

    `tokenizer` None (or params.detokenize False) leaves all text empty.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        texts: TokenTexts | None = None,
    ) -> None:
        if texts is None and tokenizer is not None:
            texts = TokenTexts(tokenizer)
        self._texts = texts
        self._sequences = [_Sequence(i, tokenizer, prompt_ids, params) for i in range(params.n)]
        self._unfinished = params.n

    @property
    def finished(self) -> bool:
        """Whether every sequence has its finish reason."""
        return self._unfinished == 0

    def unfinished(self) -> list[int]:
        """Indices of the sequences that go on."""
        return [s.index for s in self._sequences if not s.finished]

    def process(self, index: int, output: TokenOutput) -> SequenceDelta | None:
        """The delta that `output` brings to sequence `index`; None if nothing is new or it has ended already.

        A delta with a finish reason though `output` has none ended by a stop string: the engine must be told to abort.
        """
        sequence = self._sequences[index]
        if sequence.finished:
            return None
        tokens, text, reason, stop = sequence.take(output)
        logprobs = output.logprobs
        if reason is not None:
            sequence.finished = True
            self._unfinished -= 1
        elif not tokens and output.prompt_logprobs is None and output.cached_tokens is None:
            return None
        return SequenceDelta(
            index,
            text,
            tuple(tokens),
            None if logprobs is None else tuple(self._position(p) for p in logprobs[: len(tokens)]),
            reason,
            stop,
            self._prompt_positions(output),
            output.cached_tokens,
            output.error,
            output.timing,
        )

    def end(self, index: int, reason: str, error: str | None = None) -> SequenceDelta | None:
        """End sequence `index` from this side (abort, a dead engine); None if it has ended already."""
        return self.process(index, TokenOutput(request_id="", finish_reason=reason, error=error))

    def _prompt_positions(self, output: TokenOutput) -> tuple[PositionLogprobs | None, ...] | None:
        if output.prompt_logprobs is None:
            return None
        return tuple(None if p is None else self._position(p) for p in output.prompt_logprobs)

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        texts = self._texts
        ids, values = entry.token_ids, entry.logprobs
        position = {ids[0]: Logprob(values[0], entry.rank, None if texts is None else texts[ids[0]])}
        for rank in range(1, len(ids)):
            token = ids[rank]
            if token not in position:
                position[token] = Logprob(values[rank], rank, None if texts is None else texts[token])
        return position


class _Sequence:
    """Text state of one sequence."""

    __slots__ = ("_count", "_detokenizer", "_include_stop", "_matcher", "_min_tokens", "finished", "index")

    def __init__(
        self, index: int, tokenizer: TextTokenizer | None, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        self.index = index
        self.finished = False
        self._count = 0
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        text_wanted = tokenizer is not None and params.detokenize
        self._detokenizer = Detokenizer(tokenizer, prompt, params) if tokenizer and text_wanted else None
        self._matcher = StopMatcher(params.stop, self._include_stop) if params.stop and text_wanted else None

    def take(self, output: TokenOutput) -> tuple[Sequence[int], str, str | None, int | str | None]:
        """(tokens, text, finish reason, stop reason) after `output`."""
        tokens, reason = output.token_ids, output.finish_reason
        detokenizer = self._detokenizer
        if detokenizer is None:
            return tokens, "", reason, output.stop_reason
        spoken: Sequence[int] = tokens
        if reason == "stop" and not self._include_stop:
            spoken = tokens[:-1]  # the stop token has no part in the text
        if self._matcher is None:
            text = detokenizer.push(spoken) if spoken else ""
            if reason is not None:
                text += detokenizer.flush()
            return tokens, text, reason, output.stop_reason
        return self._take_matching(detokenizer, self._matcher, output, spoken)

    def _take_matching(
        self, detokenizer: Detokenizer, matcher: StopMatcher, output: TokenOutput, spoken: Sequence[int]
    ) -> tuple[Sequence[int], str, str | None, int | str | None]:
        """As `take`, token by token, because a stop string may end at any of them."""
        shown = []
        for position, token in enumerate(spoken, 1):
            self._count += 1
            piece, matched = matcher.push(detokenizer.push((token,)), self._count >= self._min_tokens)
            shown.append(piece)
            if matched is not None:
                return output.token_ids[:position], "".join(shown), "stop", matched
        if output.finish_reason is not None:
            piece, matched = matcher.push(detokenizer.flush(), self._count >= self._min_tokens)
            shown.append(piece)
            if matched is not None:
                return output.token_ids, "".join(shown), "stop", matched
            shown.append(matcher.flush())
        return output.token_ids, "".join(shown), output.finish_reason, output.stop_reason
