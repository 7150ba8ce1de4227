"""The text side of a completion: echo, log-probabilities and token ids, choice by choice.

Streams and whole answers are made of the same pieces, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET

from hardpoint.request.output import PositionLogprobs, SequenceDelta
from hardpoint.request.sampling import SamplingParams
from hardpoint.server.openai.answers import CompletionChoice
from hardpoint.server.openai.logprobs import CompletionLogprobsBuilder, prompt_logprobs
from hardpoint.server.openai.schemas import CompletionRequest
from hardpoint.server.openai.token_spelling import TokenSpelling


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is what echo gives back."""

    ids: list[int]
    text: str


class CompletionText:
    """Turns the deltas of all prompts into pieces of choices, in order. Choice = prompt's number * n + sequence."""

    def __init__(
        self, spelling: TokenSpelling, body: CompletionRequest, prompts: Sequence[Prompt], params: SamplingParams
    ) -> None:
        self.prompts = prompts
        self._n = params.n
        self._echo = bool(body.echo)
        self._return_ids = bool(body.return_token_ids)
        self._show_prompt_logprobs = body.prompt_logprobs is not None
        self._builders: list[CompletionLogprobsBuilder | None] = [
            None if params.logprobs is None else CompletionLogprobsBuilder(spelling, params)
            for _ in range(self.num_choices)
        ]
        self._needs_scores = params.prompt_logprobs is not None
        self._scores: list[Sequence[PositionLogprobs | None] | None] = [None] * len(prompts)
        self._held: list[list[SequenceDelta]] = [[] for _ in prompts]
        self._started = [False] * self.num_choices

    @property
    def num_choices(self) -> int:
        """Choices of the whole answer."""
        return len(self.prompts) * self._n

    @property
    def plain(self) -> bool:
        """Whether a piece is nothing but its delta's text."""
        return not (self._echo or self._return_ids or self._needs_scores) and self._builders[0] is None

    def choice(self, number: int, delta: SequenceDelta) -> int:
        """Index of the choice that a delta belongs to."""
        return number * self._n + delta.index

    def take(self, number: int, delta: SequenceDelta) -> list[CompletionChoice]:
        """Pieces that a delta of prompt `number` brings. Sequences wait until their prompt's scores are there."""
        if delta.prompt_logprobs is not None:
            self._scores[number] = delta.prompt_logprobs
        if self._needs_scores and self._scores[number] is None and delta.finish_reason in (None, "stop", "length"):
            self._held[number].append(delta)
            return []
        waiting = [*self._held[number], delta]
        self._held[number] = []
        return [piece for one in waiting for piece in self._pieces(number, one)]

    def _pieces(self, number: int, delta: SequenceDelta) -> list[CompletionChoice]:
        index = self.choice(number, delta)
        builder = self._builders[index]
        pieces: list[CompletionChoice] = []
        if not self._started[index]:
            self._started[index] = True
            opening = self._opening(number, index, builder)
            if opening is not None:
                pieces.append(opening)
        piece = CompletionChoice(
            index=index, text=delta.text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
        )
        if builder is not None:
            piece.logprobs = builder.add(delta)
        if self._return_ids:
            piece.token_ids = list(delta.token_ids)
        return [*pieces, piece]

    def _opening(self, number: int, index: int, builder: CompletionLogprobsBuilder | None) -> CompletionChoice | None:
        """What comes before the first generated token: the echoed prompt, its scores and ids."""
        prompt, scores = self.prompts[number], self._scores[number]
        piece = CompletionChoice(index=index, text=prompt.text if self._echo else "")
        if self._echo and builder is not None:
            if scores is not None:
                piece.logprobs = builder.echo(prompt.text, prompt.ids, scores)
            else:
                builder.skip(prompt.text)
        if self._show_prompt_logprobs and scores is not None:
            piece.prompt_logprobs = prompt_logprobs(scores)
        if self._return_ids:
            piece.prompt_token_ids = prompt.ids
            piece.token_ids = []
        shown = self._echo or self._return_ids or piece.prompt_logprobs is not UNSET
        return piece if shown else None


def join_pieces(pieces: Sequence[CompletionChoice], num_choices: int) -> list[CompletionChoice]:
    """Whole choices, by index, of the pieces of a stream."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    whole = [CompletionChoice(index=index, text="") for index in range(num_choices)]
    for piece in pieces:
        choice = whole[piece.index]
        texts[piece.index].append(piece.text)
        if piece.logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = piece.logprobs
            else:
                choice.logprobs.extend(piece.logprobs)
        if piece.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        if piece.prompt_logprobs is not UNSET:
            choice.prompt_logprobs = piece.prompt_logprobs
        if piece.prompt_token_ids is not UNSET:
            choice.prompt_token_ids = piece.prompt_token_ids
        if piece.token_ids is not UNSET:
            choice.token_ids = [*(choice.token_ids or []), *piece.token_ids]
    for choice, parts in zip(whole, texts, strict=True):
        choice.text = "".join(parts)
    return whole
