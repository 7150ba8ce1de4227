"""From prompts and messages to token ids. Long texts are tokenized in a thread, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import msgspec

from hardpoint.errors import PromptTooLong, RequestError
from hardpoint.server.openai.params import not_yet
from hardpoint.server.openai.schemas import ChatMessage, ChatRequest, ContentPart
from hardpoint_platforms.errors import HardpointError

if TYPE_CHECKING:
    from hardpoint.frontend.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_PROMPTS = 1024
#: Characters of one tool call's arguments.
MAX_ARGUMENTS = 1 << 20
#: Longer texts are tokenized in a thread.
_INLINE_CHARS = 4096
#: No tokenizer makes so few tokens of a text that this many characters per token of context could fit.
_MAX_CHARS_PER_TOKEN = 256
_RESERVED_KWARGS = frozenset(
    [
        "chat_template",
        "tokenize",
        "messages",
        "conversation",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "documents",
        "return_dict",
        "return_tensors",
    ]
)


async def encode(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, max_model_len: int, field: str
) -> list[int]:
    """Token ids of a text. Raises PromptTooLong without tokenizing what cannot fit anyway."""
    if len(text) > max_model_len * _MAX_CHARS_PER_TOKEN:
        raise PromptTooLong(
            f"The prompt has {len(text)} characters, far more than the {max_model_len} tokens of this model's context.",
            field=field,
        )
    if len(text) <= _INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a completion request, each a text or token ids. Raises RequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list.", field="prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed.", field="prompt")
    if len(kinds) > 1:
        raise RequestError("prompt mixes texts and token ids; use one kind.", field="prompt")
    return cast(list[str | list[int]], prompt)


async def render_chat(tokenizer: Tokenizer, body: ChatRequest, max_model_len: int) -> str:
    """The conversation as the model's template writes it. Raises RequestError naming the message at fault."""
    continue_final = bool(body.continue_final_message)
    add_generation_prompt = (not continue_final) if body.add_generation_prompt is None else body.add_generation_prompt
    _check_template_fields(body, continue_final, add_generation_prompt)
    if tokenizer.chat_template is None:
        raise RequestError(
            "This model has no chat template, so it cannot take messages (it is probably a base model).",
            field="messages",
            hint="Use /v1/completions, or start the server with --chat-template FILE.",
        )
    if len(body.messages) > max_model_len:
        raise PromptTooLong(
            f"There are {len(body.messages)} messages, more than the {max_model_len} tokens of this model's context.",
            field="messages",
        )
    if continue_final and body.messages[-1].role != "assistant":
        raise RequestError("continue_final_message needs a last message of role assistant.", field="messages")
    size = sum(content_size(message.content) for message in body.messages)
    if size > max_model_len * _MAX_CHARS_PER_TOKEN:
        raise PromptTooLong(
            f"The messages have {size} characters, far more than the {max_model_len} tokens of this model's context.",
            field="messages",
        )
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)

    def render() -> str:
        messages = plain_messages(body.messages, keep_developer="developer" in (tokenizer.chat_template or ""))
        try:
            return tokenizer.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final,
                tools=body.tools,
                documents=body.documents,
                **options,
            )
        except HardpointError:
            raise
        except Exception as exc:  # a template is a program of the model's maker and may raise anything
            raise RequestError(f"The chat template refused the messages: {exc}", field="messages") from exc

    if size <= _INLINE_CHARS and _is_plain(body):
        return render()
    return await asyncio.to_thread(render)


def _is_plain(body: ChatRequest) -> bool:
    """Whether there is nothing to render but a few messages with their content."""
    extras = body.tools or body.documents or body.chat_template_kwargs
    return (
        not extras
        and len(body.messages) <= 64
        and not any(
            message.tool_calls or message.reasoning or message.reasoning_content or isinstance(message.content, list)
            for message in body.messages
        )
    )


def _check_template_fields(body: ChatRequest, continue_final: bool, add_generation_prompt: bool) -> None:
    if not body.messages:
        raise RequestError("messages is empty; send at least one message.", field="messages")
    if body.chat_template is not None:
        raise RequestError(
            "chat_template in a request is refused; the server's is used (--chat-template).", field="chat_template"
        )
    if continue_final and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other.", field="continue_final_message"
        )
    taken = _RESERVED_KWARGS & set(body.chat_template_kwargs or ())
    if taken:
        raise RequestError(
            f"chat_template_kwargs must not hold {', '.join(sorted(taken))}.", field="chat_template_kwargs"
        )
    if body.tools is not None and not body.tools:
        raise RequestError("tools is an empty list; leave it out.", field="tools")
    if body.tools is None:
        if body.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools.", field="tool_choice")
    elif body.tool_choice != "none":
        field = "tools" if body.tool_choice is None else "tool_choice"
        raise not_yet(field, "Calling tools (anything but tool_choice 'none')")


def plain_messages(messages: list[ChatMessage], *, keep_developer: bool) -> list[dict[str, Any]]:
    """Messages as plain values for the template. Raises RequestError naming the message at fault."""
    plain: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role not in ROLES:
            raise RequestError(
                f"{where}.role is {message.role[:40]!r}; it must be one of {', '.join(ROLES)}.", field=f"{where}.role"
            )
        if message.content is None and message.role != "assistant":
            raise RequestError(f"{where}.content is required.", field=f"{where}.content")
        if isinstance(message.content, list):
            _check_parts(message.content, f"{where}.content")
        for index, call in enumerate(message.tool_calls or ()):
            _check_arguments(call.function.arguments, f"{where}.tool_calls[{index}].function.arguments")
        entry = {key: value for key, value in msgspec.to_builtins(message).items() if value is not None}
        if message.role == "developer" and not keep_developer:
            entry["role"] = "system"
        entry.setdefault("content", "")
        plain.append(entry)
    return plain


def _check_arguments(arguments: str | dict[str, Any] | None, where: str) -> None:
    if isinstance(arguments, str) and len(arguments) > MAX_ARGUMENTS:
        raise RequestError(
            f"{where} has {len(arguments)} characters, at most {MAX_ARGUMENTS} are allowed.", field=where
        )


def _check_parts(parts: list[ContentPart], where: str) -> None:
    for number, part in enumerate(parts):
        if part.type != "text":
            raise RequestError(
                f"{where}[{number}] is of type {part.type[:40]!r}; this model reads text only.",
                field=f"{where}[{number}].type",
            )
        if part.text is None:
            raise RequestError(f"{where}[{number}].text is required.", field=f"{where}[{number}].text")


def content_size(content: str | list[ContentPart] | None) -> int:
    """Characters of a message's text."""
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part.text or "") for part in content)
