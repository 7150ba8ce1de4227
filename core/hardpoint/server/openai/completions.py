"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.metrics.request_record import RequestRecord
from hardpoint.request.output import SequenceDelta
from hardpoint.request.sampling import SamplingParams
from hardpoint.server.context import ARRIVED
from hardpoint.server.generation import Arrival
from hardpoint.server.openai.answers import Completion, CompletionChoice, json_response, to_json
from hardpoint.server.openai.chunks import ChunkFrame
from hardpoint.server.openai.completion_text import CompletionText, Prompt, join_pieces
from hardpoint.server.openai.intake import Head, Tally, open_generation, read_request, truncated
from hardpoint.server.openai.params import fit_to_context, sampling_params
from hardpoint.server.openai.prompts import encode, split_prompts
from hardpoint.server.openai.schemas import CompletionRequest
from hardpoint.server.service import Service
from hardpoint.server.sse import DONE, EventStream

if TYPE_CHECKING:
    from hardpoint.frontend.tokenizer import Tokenizer

_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(request: Request) -> Response:
    """Continue one or more prompts, whole or as a stream of chunks."""
    service, body = await read_request(request, _decoder)
    service.model_name(body.model)
    params = sampling_params(body, service.limits, service.client.info.default_sampling)
    prompts, max_tokens = await _prompts(service, body, params)
    params = msgspec.structs.replace(params, max_tokens=max_tokens)
    text = CompletionText(service.spelling, body, prompts, params)
    ids = [prompt.ids for prompt in prompts]
    head, generation = open_generation(request, service, body, ids, params, "cmpl")
    if max_tokens == 0 and params.prompt_logprobs is None:
        async with generation:  # the echo alone: nothing to compute
            return _echo_only(head, service, body, text, request.scope[ARRIVED])
    if body.stream:
        return EventStream(generation, CompletionChunks(head, body, text))
    async with generation:
        generation.start(request.receive)
        pieces: list[CompletionChoice] = []
        tally = Tally(ids)
        async for batch in generation.batches():
            for number, delta in batch:
                tally.add(delta)
                pieces += text.take(number, delta)
        return json_response(_whole(head, text, pieces, tally))


async def _prompts(service: Service, body: CompletionRequest, params: SamplingParams) -> tuple[list[Prompt], int]:
    """The prompts as token ids, and the number of tokens that all of them may generate."""
    limits = service.limits
    max_model_len = service.client.info.max_model_len
    add_special_tokens = body.add_special_tokens is not False
    prompts: list[Prompt] = []
    allowed: list[int] = []
    for item in split_prompts(body.prompt):
        await asyncio.sleep(0)  # many prompts, each short, must not hold others up together
        if isinstance(item, str):
            ids = await encode(
                service.tokenizer,
                item,
                add_special_tokens=add_special_tokens,
                max_model_len=max_model_len,
                field="prompt",
            )
        else:
            ids = item
        kept = truncated(ids, body, max_model_len)
        allowed.append(fit_to_context(params, kept, body.max_tokens, limits, ("prompt", "max_tokens")))
        written = item if isinstance(item, str) and len(kept) == len(ids) else None
        prompts.append(Prompt(kept, _echo_text(service.tokenizer, kept, written, params) if body.echo else ""))
    return prompts, min(allowed)


def _echo_text(tokenizer: Tokenizer, ids: list[int], written: str | None, params: SamplingParams) -> str:
    """A prompt's text: as it was written, or decoded where it came as (or was cut to) token ids."""
    if written is not None:
        return written
    return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)


def _whole(head: Head, text: CompletionText, pieces: list[CompletionChoice], tally: Tally) -> Completion:
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=join_pieces(pieces, text.num_choices),
        usage=tally.usage(),
    )


def _echo_only(head: Head, service: Service, body: CompletionRequest, text: CompletionText, arrived: float) -> Response:
    ids = [prompt.ids for prompt in text.prompts]
    batch: list[Arrival] = [(number, SequenceDelta(0, finish_reason="length")) for number in range(len(ids))]
    for number, delta in batch:
        record = RequestRecord(service.metrics, arrived=arrived, prompt_tokens=len(ids[number]), n=1, max_tokens=0)
        record.add(delta)
    if body.stream:
        writer = CompletionChunks(head, body, text)
        return Response(writer.write(batch) + writer.finish() + DONE, media_type="text/event-stream")
    pieces = [piece for number, delta in batch for piece in text.take(number, delta)]
    return json_response(_whole(head, text, pieces, Tally(ids)))


class CompletionChunks(ChunkFrame):
    """Events of a streamed completion: text as it comes, the last one of a choice with its finish reason."""

    def __init__(self, head: Head, body: CompletionRequest, text: CompletionText) -> None:
        super().__init__(head, "text_completion", [prompt.ids for prompt in text.prompts], body.stream_options)
        self._text = text
        self._opening = [b'{"index":%d,"text":' % i for i in range(text.num_choices)]

    def write(self, batch: list[Arrival]) -> bytes:
        """Events for these deltas."""
        events: list[bytes] = []
        for number, delta in batch:
            self.count(delta)
            if self._text.plain and delta.finish_reason is None:
                if delta.text:
                    text = self._opening[self._text.choice(number, delta)] + to_json(delta.text)
                    events.append(self.frame(text + b',"logprobs":null,"finish_reason":null,"stop_reason":null}'))
                continue
            pieces = self._text.take(number, delta)
            events += [self.frame(to_json(piece)) for piece in pieces if _worth_sending(piece)]
        return b"".join(events)


def _worth_sending(piece: CompletionChoice) -> bool:
    has_entries = piece.logprobs is not None and bool(piece.logprobs.tokens)
    return bool(piece.text or has_entries or piece.finish_reason) or piece.token_ids is not UNSET
