"""The first and last steps that chat and text completions share: read and check the body, open a generation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request

from hardpoint.errors import RequestError
from hardpoint.request.output import SequenceDelta
from hardpoint.request.sampling import SamplingParams
from hardpoint.server.body import read_body
from hardpoint.server.context import ARRIVED, REQUEST_ID, plain_id
from hardpoint.server.generation import Generation, GenerationRequest
from hardpoint.server.json_body import decode_body
from hardpoint.server.openai.answers import Usage, usage
from hardpoint.server.openai.schemas import SamplingFields
from hardpoint.server.service import Service, service_of

T = TypeVar("T")


async def read_request(request: Request, decoder: msgspec.json.Decoder[T]) -> tuple[Service, T]:
    """The service and the decoded body. Raises RequestError, EngineBusy, EngineDead, ClientGone."""
    service = service_of(request)
    raw = await read_body(request, service.server.max_body_bytes)
    service.check_open()
    return service, await decode_body(raw, decoder)


@dataclass(frozen=True)
class Head:
    """What every chunk and answer of one request begins with."""

    id: str
    created: int
    model: str


def open_generation(
    request: Request,
    service: Service,
    body: SamplingFields,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    kind: str,
) -> tuple[Head, Generation]:
    """Take a place in the server and prepare the generation. Raises EngineBusy. `kind` begins the answer's id."""
    if body.request_id is not None and not plain_id(body.request_id):
        raise RequestError("request_id must be visible ASCII characters.", field="request_id")
    public_id = body.request_id or request.scope[REQUEST_ID]
    ticket = service.lifecycle.enter(public_id)
    head = Head(f"{kind}-{public_id}", int(time.time()), service.model_name(body.model))
    asked = GenerationRequest(
        prompts,
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        deadline=body.timeout,
        streaming=bool(body.stream),
    )
    return head, Generation(service, asked, ticket, request.scope[ARRIVED])


class Tally:
    """Counts for `usage`."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._completion_tokens = 0
        self._cached_tokens = 0

    def add(self, delta: SequenceDelta) -> None:
        """Count one delta."""
        self._completion_tokens += len(delta.token_ids)
        # Sequences after the first share its pages, which is no prefix hit.
        if delta.cached_tokens and delta.index == 0:
            self._cached_tokens += delta.cached_tokens

    def usage(self) -> Usage:
        """The counts so far."""
        return usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)


def truncated(prompt: list[int], body: SamplingFields, max_model_len: int) -> list[int]:
    """The prompt's last `truncate_prompt_tokens` tokens; -1 keeps what leaves room for max_tokens (or one token)."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep < -1 or keep == 0:
        raise RequestError("truncate_prompt_tokens must be -1 or at least 1.", field="truncate_prompt_tokens")
    if keep == -1:
        keep = max(1, max_model_len - max(body.max_tokens or 1, 1))
    return prompt[-keep:]
