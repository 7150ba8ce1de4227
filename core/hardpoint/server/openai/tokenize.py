"""`POST /tokenize` (a text or a conversation) and `POST /detokenize`."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.errors import RequestError
from hardpoint.server.body import read_body
from hardpoint.server.json_body import decode_body
from hardpoint.server.openai.answers import DetokenizeAnswer, TokenizeAnswer, json_response
from hardpoint.server.openai.intake import read_request
from hardpoint.server.openai.prompts import encode, render_chat
from hardpoint.server.openai.schemas import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenizeTextRequest,
)
from hardpoint.server.service import service_of

_form = msgspec.json.Decoder(TokenizeRequest)
_text = msgspec.json.Decoder(TokenizeTextRequest)
_chat = msgspec.json.Decoder(TokenizeChatRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: Request) -> Response:
    """Token ids of a text (special tokens added by default) or of a conversation (none added by default)."""
    service = service_of(request)
    raw = await read_body(request, service.server.max_body_bytes)
    service.client.check_health()
    form = await decode_body(raw, _form)
    max_model_len = service.client.info.max_model_len
    tokenizer = service.tokenizer
    body: TokenizeTextRequest | TokenizeChatRequest
    if form.messages is not msgspec.UNSET:
        body = await decode_body(raw, _chat)
        text, special, field = (
            await render_chat(tokenizer, body, max_model_len),
            bool(body.add_special_tokens),
            "messages",
        )
    elif form.prompt is not msgspec.UNSET:
        body = await decode_body(raw, _text)
        text, special, field = body.prompt, body.add_special_tokens is not False, "prompt"
    else:
        raise RequestError("Field 'prompt' or 'messages' is required.", field="prompt")
    service.model_name(body.model)
    ids = await encode(tokenizer, text, add_special_tokens=special, max_model_len=max_model_len, field=field)
    texts = [tokenizer.id_to_token(id) or "" for id in ids] if body.return_token_strs else None
    return json_response(TokenizeAnswer(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=texts))


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens shown."""
    service, body = await read_request(request, _detokenize)
    service.model_name(body.model)
    tokenizer = service.tokenizer
    size = max(tokenizer.vocab_size, service.client.info.vocab_size)
    if body.tokens and (min(body.tokens) < 0 or max(body.tokens) >= size):
        number = next(number for number, token in enumerate(body.tokens) if not 0 <= token < size)
        raise RequestError(
            f"tokens[{number}] is {body.tokens[number]}, outside the vocabulary (0 to {size - 1}).",
            field=f"tokens[{number}]",
        )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeAnswer(prompt=text))
