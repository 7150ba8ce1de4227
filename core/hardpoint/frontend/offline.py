"""Many requests through an engine in this process, to their end: what `hardpoint.llm.LLM` runs.

jobs -> EngineRequests -> Engine.step ... -> OutputProcessor -> RequestOutput, in the order of the jobs
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint.errors import EngineDead
from hardpoint.frontend.output import OutputProcessor, TokenTexts
from hardpoint.frontend.requests import complete, expand
from hardpoint.frontend.streams import ClientTokenizer, refusal
from hardpoint.protocol.messages import TokenOutput
from hardpoint.request.output import CompletionOutput, RequestOutput, SequenceDelta
from hardpoint.request.sampling import SamplingParams

if TYPE_CHECKING:
    from hardpoint.engine.loop import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One checked request. `text`: the prompt as given, None for token ids."""

    prompt: Sequence[int]
    params: SamplingParams
    text: str | None = None
    priority: int = 0
    cache_salt: str = ""


class OfflineRunner:
    """Owns the engine and the text side of what runs on it. One call of `run` at a time."""

    def __init__(self, engine: Engine, tokenizer: ClientTokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._numbers = itertools.count()
        self._routes: dict[str, tuple[_Collector, int]] = {}
        self._dead: EngineDead | None = None

    def run(self, jobs: Sequence[Job], on_done: Callable[[RequestOutput], None]) -> list[RequestOutput]:
        """All jobs to their end; `on_done` is called as each ends.

        Raises RequestError if the engine refuses one (the others are aborted then), EngineDead if the engine breaks. A
        request that fails alone has finish reason "error". Interrupting it aborts what still runs.
        """
        if self._dead is not None:
            raise self._dead
        collectors = [self._submit(job) for job in jobs]
        try:
            while self._routes:
                for output in self._step():
                    self._take(output, on_done)
        finally:
            self._abort_all()
        return [collector.finish() for collector in collectors]

    def close(self) -> None:
        """Give the device back."""
        self._abort_all()
        self._dead = EngineDead("this LLM is closed")
        self._engine.close()

    def _submit(self, job: Job) -> _Collector:
        params = complete(job.params, self._tokenizer)
        name = str(next(self._numbers))
        collector = _Collector(name, job, OutputProcessor(self._tokenizer, job.prompt, params, self._texts))
        children = expand(job.prompt, params, request_id=name, priority=job.priority, cache_salt=job.cache_salt)
        for index, child in enumerate(children):
            self._routes[child.request_id] = (collector, index)
            self._engine.add(child)
        return collector

    def _step(self) -> list[TokenOutput]:
        try:
            return self._engine.step().outputs
        except Exception as error:
            self._dead = EngineDead(f"the engine failed: {error}")
            self._engine.fail(str(error))
            self._engine.close()
            raise self._dead from error

    def _take(self, output: TokenOutput, on_done: Callable[[RequestOutput], None]) -> None:
        route = self._routes.get(output.request_id)
        if route is None:
            return
        collector, index = route
        if output.error_kind is not None:
            raise refusal(output)
        delta = collector.processor.process(index, output)
        if delta is None:
            return
        collector.add(delta)
        if delta.finish_reason is not None:
            del self._routes[output.request_id]
            if output.finish_reason is None:
                self._engine.abort(output.request_id)
            if delta.error is not None:
                log.warning("prompt %s failed: %s", collector.name, delta.error)
            if collector.processor.finished:
                on_done(collector.finish())

    def _abort_all(self) -> None:
        for request_id in self._routes:
            self._engine.abort(request_id)
        self._routes.clear()


class _Collector:
    """Deltas of one request on their way to a RequestOutput."""

    def __init__(self, name: str, job: Job, processor: OutputProcessor) -> None:
        self.name = name
        self.processor = processor
        wanted = job.params.logprobs is not None
        outputs = [CompletionOutput(i, logprobs=[] if wanted else None) for i in range(job.params.n)]
        self._output = RequestOutput(name, job.text, list(job.prompt), outputs)
        self._pieces: list[list[str]] = [[] for _ in outputs]

    def add(self, delta: SequenceDelta) -> None:
        """Note what is new."""
        output = self._output.outputs[delta.index]
        output.token_ids.extend(delta.token_ids)
        if delta.text:
            self._pieces[delta.index].append(delta.text)
        if delta.logprobs is not None and output.logprobs is not None:
            output.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self._output.prompt_logprobs = list(delta.prompt_logprobs)
        if delta.cached_tokens is not None and delta.index == 0:
            self._output.num_cached_tokens = delta.cached_tokens
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason

    def finish(self) -> RequestOutput:
        """The whole. May be called again."""
        for output, pieces in zip(self._output.outputs, self._pieces, strict=True):
            output.text = "".join(pieces)
            if output.logprobs is not None:
                drawn = zip(output.logprobs, output.token_ids, strict=True)
                output.cumulative_logprob = sum(position[token].logprob for position, token in drawn)
        self._output.finished = self.processor.finished
        return self._output
