"""Who answers in `run` and `chat`: an engine started for this command, or a running server. Both stream text.

The terminal stays in the main thread, so that line editing and Ctrl-C work as everywhere; the event loop lives in a
thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hardpoint.bench.load import Target
from hardpoint.errors import EngineError
from hardpoint.frontend.requests import limits_of
from hardpoint.request.sampling import SamplingParams
from hardpoint.request.validation import validate, validate_prompt

if TYPE_CHECKING:
    import httpx

    from hardpoint.cli.local_engine import LocalEngine

T = TypeVar("T")
Message = dict[str, str]


@dataclass
class Answer:
    """What is known of an answer when its stream has ended."""

    tokens: int = 0
    finish_reason: str | None = None


class Speaker(ABC):
    """Streams answers to conversations."""

    name: str

    @abstractmethod
    def reply(self, messages: Sequence[Message], params: SamplingParams, answer: Answer) -> AsyncIterator[str]:
        """Text pieces of the answer; `answer` is filled in. Closing the iterator stops the generation."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the engine or the connection."""


class LocalSpeaker(Speaker):
    """Speaks through an engine of this command."""

    def __init__(self, local: LocalEngine, name: str) -> None:
        self._local, self.name = local, name

    @property
    def has_template(self) -> bool:
        """Whether the model can chat; a base model cannot."""
        return self._local.tokenizer.has_chat_template

    async def reply(self, messages: Sequence[Message], params: SamplingParams, answer: Answer) -> AsyncIterator[str]:
        prompt = self._local.chat_prompt(messages)
        async for text in self.complete(prompt, params, answer):
            yield text

    async def complete(self, prompt: Sequence[int], params: SamplingParams, answer: Answer) -> AsyncIterator[str]:
        """Continue a prompt of token ids."""
        limits = limits_of(self._local.client.info)
        validate(params, limits)
        validate_prompt(prompt, params, limits)
        stream = self._local.client.generate(prompt, params, request_id=f"terminal-{uuid.uuid4().hex[:12]}")
        try:
            async for delta in stream:
                answer.tokens += len(delta.token_ids)
                if delta.text:
                    yield delta.text
                if delta.finish_reason == "error":
                    raise EngineError(delta.error or "the engine could not finish this answer")
                answer.finish_reason = delta.finish_reason or answer.finish_reason
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def close(self) -> None:
        await self._local.client.close()


class ServerSpeaker(Speaker):
    """Speaks through a running server of the OpenAI kind."""

    def __init__(self, target: Target, name: str) -> None:
        self._target, self.name = target, name

    async def reply(self, messages: Sequence[Message], params: SamplingParams, answer: Answer) -> AsyncIterator[str]:
        import httpx

        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **request_fields(params),
        }
        key = {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        try:
            async with (
                httpx.AsyncClient(timeout=httpx.Timeout(10.0, read=None), headers=key) as client,
                client.stream("POST", f"{self._target.url}/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    raise EngineError(_refusal(await response.aread(), response.status_code))
                async for text in _pieces(response, answer):
                    yield text
        except httpx.HTTPError as error:
            raise EngineError(
                f"{self._target.url}: {error or type(error).__name__}", hint="is the server running?"
            ) from error

    async def close(self) -> None:
        return None


def request_fields(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that differ from the defaults, in OpenAI's spelling."""
    fields: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    if params.max_tokens is not None:
        fields["max_tokens"] = params.max_tokens
    if params.seed is not None:
        fields["seed"] = params.seed
    if params.stop:
        fields["stop"] = list(params.stop)
    return fields


async def _pieces(response: httpx.Response, answer: Answer) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise EngineError(str(event["error"].get("message", event["error"])))
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if text := choice["delta"].get("content"):
                yield text


def _refusal(body: bytes, status: int) -> str:
    try:
        return f"the server refuses (HTTP {status}): {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server refuses (HTTP {status}): {body[:200].decode(errors='replace')}"


class LoopThread:
    """An event loop in a thread of its own, driven from the main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hardpoint-terminal", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result. KeyboardInterrupt cancels the work and goes on up."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def iterate(self, pieces: AsyncIterator[str]) -> Iterator[str]:
        """The pieces, one by one, as they come. Leaving early (Ctrl-C) closes the stream first."""
        arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for piece in pieces:
                    arrived.put(piece)
            finally:
                await pieces.aclose()  # type: ignore[attr-defined]
                arrived.put(None)

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (piece := arrived.get()) is not None:
                yield piece
            future.result()
        finally:
            if not future.done():
                future.cancel()
                while arrived.get() is not None:  # the stream closes first, so that the engine is free again
                    pass

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
