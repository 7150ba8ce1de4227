"""`POST /v1/chat/completions`."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.request.output import PositionLogprobs, SequenceDelta
from hardpoint.request.sampling import SamplingParams
from hardpoint.server.generation import Arrival, Generation
from hardpoint.server.openai.answers import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    json_response,
    to_json,
)
from hardpoint.server.openai.chunks import ChunkFrame
from hardpoint.server.openai.intake import Head, Tally, open_generation, read_request, truncated
from hardpoint.server.openai.logprobs import chat_logprobs, prompt_logprobs
from hardpoint.server.openai.params import fit_to_context, sampling_params
from hardpoint.server.openai.prompts import encode, render_chat
from hardpoint.server.openai.schemas import ChatRequest
from hardpoint.server.openai.token_spelling import TokenSpelling
from hardpoint.server.sse import EventStream

_decoder = msgspec.json.Decoder(ChatRequest)


@dataclass(frozen=True)
class ChatTask:
    """One checked chat request."""

    body: ChatRequest
    spelling: TokenSpelling
    prompt: list[int]
    params: SamplingParams

    @property
    def echoed(self) -> str:
        """What every answer begins with: the final message's text, where it is continued and echo asks for it."""
        last = self.body.messages[-1]
        if not self.body.echo or last.role != "assistant":
            return ""
        content = last.content or ""
        return content if isinstance(content, str) else "\n".join(part.text or "" for part in content)

    def logprobs(self, delta: SequenceDelta) -> ChatLogprobs | None:
        """Entries of a delta, None if not asked for."""
        return chat_logprobs(self.spelling, delta, self.params) if self.params.logprobs is not None else None


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    service, body = await read_request(request, _decoder)
    service.model_name(body.model)
    limits = service.limits
    max_model_len = service.client.info.max_model_len
    params = sampling_params(body, limits, service.client.info.default_sampling)
    text = await render_chat(service.tokenizer, body, max_model_len)
    prompt = await encode(
        service.tokenizer,
        text,
        add_special_tokens=bool(body.add_special_tokens),
        max_model_len=max_model_len,
        field="messages",
    )
    prompt = truncated(prompt, body, max_model_len)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = fit_to_context(params, prompt, asked, limits, ("messages", name))
    params = msgspec.structs.replace(params, max_tokens=max_tokens)
    task = ChatTask(body, service.spelling, prompt, params)
    head, generation = open_generation(request, service, body, [prompt], params, "chatcmpl")
    if body.stream:
        return EventStream(generation, ChatChunks(head, task))
    async with generation:
        generation.start(request.receive)
        return json_response(await _whole_answer(head, task, generation))


@dataclass
class _Answer:
    """One sequence as it comes together."""

    texts: list[str]
    token_ids: list[int] = field(default_factory=list)
    logprobs: ChatLogprobs = field(default_factory=ChatLogprobs)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


async def _whole_answer(head: Head, task: ChatTask, generation: Generation) -> ChatCompletion:
    answers = [_Answer([task.echoed]) for _ in range(task.params.n)]
    tally = Tally([task.prompt])
    scored: tuple[PositionLogprobs | None, ...] | None = None
    async for batch in generation.batches():
        for _, delta in batch:
            tally.add(delta)
            answer = answers[delta.index]
            answer.texts.append(delta.text)
            answer.token_ids += delta.token_ids
            entries = task.logprobs(delta)
            if entries is not None:
                answer.logprobs.content += entries.content
            if delta.prompt_logprobs is not None:
                scored = delta.prompt_logprobs
            if delta.finish_reason is not None:
                answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
    choices = [
        ChatChoice(
            index=index,
            message=AnswerMessage(content="".join(answer.texts)),
            logprobs=answer.logprobs if task.params.logprobs is not None else None,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if task.body.return_token_ids else UNSET,
        )
        for index, answer in enumerate(answers)
    ]
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=choices,
        usage=tally.usage(),
        prompt_logprobs=UNSET if scored is None else prompt_logprobs(scored),
        prompt_token_ids=task.prompt if task.body.return_token_ids else UNSET,
    )


class ChatChunks(ChunkFrame):
    """Events of a streamed chat. Per choice: the role, then text, then an empty delta with the finish reason."""

    def __init__(self, head: Head, task: ChatTask) -> None:
        super().__init__(head, "chat.completion.chunk", [task.prompt], task.body.stream_options)
        self._task = task
        self._plain = task.params.logprobs is None and not task.body.return_token_ids
        self._started = [False] * task.params.n
        self._opening = [b'{"index":%d,"delta":{"content":' % i for i in range(task.params.n)]

    def write(self, batch: list[Arrival]) -> bytes:
        """Events for these deltas."""
        events: list[bytes] = []
        for _, delta in batch:
            self.count(delta)
            if not self._started[delta.index]:
                self._started[delta.index] = True
                self._begin(delta.index, events)
            if self._plain:
                if delta.text:
                    text = self._opening[delta.index] + to_json(delta.text)
                    events.append(self.frame(text + b'},"logprobs":null,"finish_reason":null}'))
            elif delta.text or delta.token_ids:
                events.append(self.frame(to_json(self._choice(delta))))
            if delta.finish_reason is not None:
                end = ChunkChoice(
                    index=delta.index,
                    delta=Delta(),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
                events.append(self.frame(to_json(end)))
        return b"".join(events)

    def _begin(self, index: int, events: list[bytes]) -> None:
        first = Delta(role="assistant", content="")
        events.append(self.frame(to_json(ChunkChoice(index=index, delta=first))))
        if self._task.echoed:
            events.append(self.frame(to_json(ChunkChoice(index=index, delta=Delta(content=self._task.echoed)))))

    def _choice(self, delta: SequenceDelta) -> ChunkChoice:
        return ChunkChoice(
            index=delta.index,
            delta=Delta(content=delta.text),
            logprobs=self._task.logprobs(delta),
            token_ids=list(delta.token_ids) if self._task.body.return_token_ids else UNSET,
        )
