"""Running requests of one front end: outputs of the engine go to the streams that wait for them.

`StreamingClient` is `EngineClient` but for the transport: subclasses send messages, and pass on, on the event loop, the
outputs that come. Text is made when an output arrives, not when the caller reads it, so that a stop string
frees the engine at once however slow the reader is.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from hardpoint import errors
from hardpoint.errors import EngineBusy, EngineDead, EngineError, RequestError
from hardpoint.frontend.client import EngineClient
from hardpoint.frontend.output import OutputProcessor, TextTokenizer, TokenTexts
from hardpoint.frontend.requests import Encoder, complete, expand
from hardpoint.protocol.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    Outputs,
    ResetPrefixCache,
    Submit,
    ToEngine,
    TokenOutput,
)
from hardpoint.request.choice import check_choice
from hardpoint.request.output import SequenceDelta
from hardpoint.request.sampling import SamplingParams
from hardpoint.request.validation import check_priority, check_unicode
from hardpoint_platforms.errors import HardpointError

log = logging.getLogger(__name__)


class ClientTokenizer(TextTokenizer, Encoder, Protocol):
    """What a client needs of `hardpoint.frontend.tokenizer.Tokenizer`."""


class RequestStream:
    """Deltas on their way to one reader."""

    def __init__(self, request_id: str, processor: OutputProcessor) -> None:
        self.request_id = request_id
        self.processor = processor
        self._deltas: deque[SequenceDelta] = deque()
        self._error: HardpointError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether the engine has nothing more to bring."""
        return self._error is not None or self.processor.finished

    def put(self, delta: SequenceDelta) -> None:
        """Add a delta and wake the reader."""
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: HardpointError) -> None:
        """Raise `error` in the reader, behind the deltas that it has not read yet."""
        if not self.done:
            self._error = error
            self._wake()

    async def read(self) -> SequenceDelta | None:
        """The next delta, None at the end. Raises what `fail` was given."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.processor.finished:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._deltas.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamingClient(EngineClient):
    """The part of a client that does not depend on the transport. Used on one event loop."""

    def __init__(self, tokenizer: ClientTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._streams: dict[str, RequestStream] = {}
        self._routes: dict[str, tuple[RequestStream, int]] = {}
        self._dead: EngineDead | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineBusy("the engine is still starting")
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Queue a message for the engine, without waiting."""

    def use_tokenizer(self, tokenizer: ClientTokenizer) -> None:
        """Set the tokenizer, where it was not there yet when the client was made. To be called before `start`."""
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)

    def check_health(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead.message, hint=self._dead.hint)
        if self._info is None:
            raise EngineBusy("the engine is still starting")

    @property
    def gone(self) -> bool:
        return self._dead is not None

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> AsyncIterator[SequenceDelta]:
        stream = self._submit(prompt, params, request_id, priority, deadline, cache_salt)
        try:
            while (delta := await stream.read()) is not None:
                yield delta
        finally:
            self._forget(stream)

    async def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is None or stream.done:
            return
        self._drop(stream)
        for index in stream.processor.unfinished():
            delta = stream.processor.end(index, "abort")
            if delta is not None:
                stream.put(delta)

    async def reset_prefix_cache(self) -> None:
        self.check_health()
        self._send(ResetPrefixCache())

    def _submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        priority: int,
        deadline: float | None,
        cache_salt: str,
    ) -> RequestStream:
        if self._dead is not None:
            self.check_health()
        info = self.info
        check_unicode(request_id, "request_id")
        check_unicode(cache_salt, "cache_salt")
        check_priority(priority, info.policy)
        if request_id in self._streams:
            raise RequestError(f"a request with id {request_id!r} is running already", field="request_id")
        params = complete(params, self._tokenizer)
        check_choice(params, info.vocab_size)
        children = expand(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
        )
        stream = RequestStream(request_id, OutputProcessor(self._tokenizer, prompt, params, self._texts))
        self._streams[request_id] = stream
        for index, child in enumerate(children):
            self._routes[child.request_id] = (stream, index)
        self._send(Submit(children))
        return stream

    def _drop(self, stream: RequestStream) -> None:
        """Tell the engine to forget what is left of the request."""
        live = [f"{stream.request_id}#{index}" for index in stream.processor.unfinished()]
        live = [child for child in live if self._routes.pop(child, None) is not None]
        if live and self._dead is None:
            self._send(Abort(live))

    def _forget(self, stream: RequestStream) -> None:
        """The reader is done, by the end, an error or because it went away."""
        self._drop(stream)
        self._streams.pop(stream.request_id, None)

    def _receive_outputs(self, message: Outputs) -> None:
        """Hand each output to its stream."""
        self._stats = message.stats
        stopped: list[str] = []
        for output in message.outputs:
            route = self._routes.get(output.request_id)
            if route is None:
                continue  # aborted, or ended by a stop string, while this was under way
            stream, index = route
            if output.error_kind is not None:
                stream.fail(refusal(output))
                self._drop(stream)
                continue
            try:
                delta = stream.processor.process(index, output)
            except Exception as error:
                log.exception("the output of request %s cannot be turned into text", stream.request_id)
                stream.fail(EngineError(f"the output cannot be turned into text: {error}"))
                self._drop(stream)
                continue
            if delta is None:
                continue
            if delta.finish_reason is not None:
                del self._routes[output.request_id]
                if output.finish_reason is None:
                    stopped.append(output.request_id)
            stream.put(delta)
        if stopped:
            self._send(Abort(stopped))

    def _fail_all(self, error: EngineDead) -> None:
        """The engine is gone: every stream raises."""
        if self._dead is None:
            self._dead = error
        self._routes.clear()
        for stream in self._streams.values():
            stream.fail(EngineDead(error.message, hint=error.hint))


def refusal(output: TokenOutput) -> RequestError:
    """The error that the engine answered a request with, as an exception."""
    kind = getattr(errors, output.error_kind or "", RequestError)
    if not (isinstance(kind, type) and issubclass(kind, RequestError)):
        kind = RequestError
    return kind(output.error or "the engine refused the request", field=output.error_field)
