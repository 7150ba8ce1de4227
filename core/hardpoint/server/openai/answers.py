"""Response bodies, as OpenAI and vLLM spell them. Encoded with msgspec; `UNSET` fields are left out."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens read and generated. A prompt with n > 1 sequences counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a text completion: four lists of one length.

    The tokens joined are the choice's text; a token without a part in the text (end of sequence) is "", one that holds
    part of a character is "bytes:\\xNN...". Offsets count characters of `text`.
    """

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []

    def extend(self, other: CompletionLogprobs) -> None:
        """Append another piece's entries."""
        self.text_offset += other.text_offset
        self.token_logprobs += other.token_logprobs
        self.tokens += other.tokens
        self.top_logprobs += other.top_logprobs


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text of a completion, or one piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """`/v1/completions`: the whole answer, or one chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    """A token that might have been. `bytes` are its UTF-8 bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token of the answer, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob] = []
    refusal: None = None


class AnswerMessage(msgspec.Struct, kw_only=True):
    """What the model said."""

    role: str = "assistant"
    content: str
    refusal: str | None = None


class Delta(msgspec.Struct, kw_only=True):
    """What is new of a message in a stream."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """One piece of one answer in a stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """`/v1/chat/completions`: the whole answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """`/v1/chat/completions`: one event of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """One name that this server answers to."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "hardpoint"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = []


class ModelList(msgspec.Struct, kw_only=True):
    """`GET /v1/models`."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    prompt: str


_encoder = msgspec.json.Encoder()


def to_json(answer: object) -> bytes:
    """One line of JSON."""
    return _encoder.encode(answer)


def json_response(answer: object) -> Response:
    """A 200 with a JSON body."""
    return Response(_encoder.encode(answer), media_type="application/json")


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """A usage object from its three counts."""
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached_tokens))
