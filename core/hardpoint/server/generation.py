"""One HTTP request's generations under way: one per prompt, merged, watched for the client's leaving.

    client.generate (per prompt) --> pump task --> ready list --> batches() --> the response
    receive() -------------------> watch task --> interrupt

Deltas that are ready at the same time come out as one batch, and so become one write. Leaving the `async with` block
cancels the pumps, which closes the engine client's iterators, which aborts the requests and frees their pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from starlette.types import Receive

from hardpoint.errors import EngineError
from hardpoint.frontend.client import EngineClient
from hardpoint.metrics.request_record import RequestRecord
from hardpoint.request.output import SequenceDelta
from hardpoint.request.sampling import SamplingParams
from hardpoint.server.errors import ClientGone
from hardpoint.server.lifecycle import Lifecycle, Ticket
from hardpoint.server.service import Service

#: (prompt's number, what is new of one of its sequences)
Arrival = tuple[int, SequenceDelta]


@dataclass(frozen=True)
class GenerationRequest:
    """What to ask of the engine: the same parameters for each prompt. deadline: seconds from now, None for never."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    streaming: bool = False


class Generation:
    """Runs a GenerationRequest. Use as `async with`, then iterate `batches()` once."""

    def __init__(self, service: Service, request: GenerationRequest, ticket: Ticket, arrived: float) -> None:
        self._client: EngineClient = service.client
        self._metrics = service.metrics
        self._lifecycle: Lifecycle = service.lifecycle
        self._request = request
        self._ticket = ticket
        self._arrived = arrived
        self._ready: list[Arrival] = []
        self._open = len(request.prompts)
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, receive: Receive) -> None:
        """Submit every prompt and begin to watch the connection. The body must have been read."""
        self._ticket.on_interrupt(self._interrupt)
        self._tasks.append(asyncio.create_task(self._watch(receive)))
        self._tasks.append(asyncio.create_task(self._submit()))

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._lifecycle.leave(self._ticket)

    async def batches(self) -> AsyncIterator[list[Arrival]]:
        """Deltas in order of arrival, all that are ready at a time.

        Raises what the engine client raised, the reason of an interruption, and ClientGone.
        """
        while True:
            if self._ready:
                batch, self._ready = self._ready, []
                yield batch
            elif self._error is not None:
                raise self._error
            elif self._open == 0:
                return
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    async def _submit(self) -> None:
        """A thousand prompts at once would keep everybody else waiting."""
        for number in range(len(self._request.prompts)):
            self._tasks.append(asyncio.create_task(self._pump(number)))
            await asyncio.sleep(0)

    async def _pump(self, number: int) -> None:
        request = self._request
        prompt = request.prompts[number]
        engine_id = self._ticket.id if len(request.prompts) == 1 else f"{self._ticket.id}-{number}"
        self._ticket.engine_ids.append(engine_id)
        params = request.params
        record = RequestRecord(
            self._metrics,
            arrived=self._arrived,
            prompt_tokens=len(prompt),
            n=params.n,
            max_tokens=params.max_tokens or 0,
        )
        stream = self._client.generate(
            prompt,
            params,
            request_id=engine_id,
            priority=request.priority,
            deadline=request.deadline,
            cache_salt=request.cache_salt,
        )
        try:
            async for delta in stream:
                record.add(delta)
                self._ready.append((number, delta))
                if delta.finish_reason == "error":
                    raise EngineError(delta.error or "The engine could not finish this request.")
                if request.streaming:
                    self._wake()
        except Exception as exc:
            self._error = self._error or exc
        finally:
            await _close(stream)
            self._open -= 1
            if self._open == 0 or self._error is not None:
                self._wake()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._metrics.client_gone()
        self._interrupt(ClientGone())

    def _interrupt(self, reason: Exception) -> None:
        self._error = self._error or reason
        self._ready.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _close(stream: AsyncIterator[SequenceDelta]) -> None:
    """Close the engine client's iterator, which aborts what still runs."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
