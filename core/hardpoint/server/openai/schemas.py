"""Request bodies, as OpenAI and vLLM spell them. Types are checked here, ranges in `params.py`.

Every field may be null, which means "not given". Unknown fields are ignored. Fields named in `LATER` would change the
answer, so they are refused until they work instead of being dropped without a word.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Seconds = Annotated[
    float,
    msgspec.Meta(
        gt=0,
        description="Seconds after which the request ends with finish_reason 'timeout' and the text it has until "
        "then, time in the queue included. An extension of OpenAI's protocol; without it there is no limit.",
    ),
]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]

#: Accepted by other servers, not by this one yet.
LATER = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logit_processors",
    "logits_processors",
    "logprob_token_ids",
    "prompt_embeds",
    "stop_regex",
    "thinking_token_budget",
    "repetition_detection",
    "kv_transfer_params",
    "use_beam_search",
    "audio",
    "functions",
    "function_call",
)


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    echo: bool | None = None
    priority: Int64 | None = None
    cache_salt: Salt | None = None
    request_id: Name | None = None
    timeout: Seconds | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logit_processors: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    prompt_embeds: Any = None
    stop_regex: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    kv_transfer_params: Any = None
    use_beam_search: Any = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`. `prompt` is a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content; only type "text" is served."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call that the model made earlier. `arguments` is JSON as text, or already an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier assistant message."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None


class TokenizeTextRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize` of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest, kw_only=True):
    """`POST /tokenize` of a conversation: takes what `/v1/chat/completions` takes."""

    return_token_strs: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Tells the two forms of `POST /tokenize` apart."""

    prompt: Any = msgspec.UNSET
    messages: Any = msgspec.UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """`POST /abort_requests`: ids of requests as they were given or answered."""

    request_ids: Annotated[list[str], msgspec.Meta(max_length=4096)]
