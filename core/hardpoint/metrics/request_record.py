"""What one request adds to the metrics: fed with its deltas, in order."""

from __future__ import annotations

import time

from hardpoint.metrics.registry import ServerMetrics
from hardpoint.protocol.messages import RequestTiming
from hardpoint.request.output import SequenceDelta


class _Sequence:
    __slots__ = ("first", "last", "tokens")

    def __init__(self) -> None:
        self.first = 0.0
        self.last = 0.0
        self.tokens = 0


class RequestRecord:
    """Times and counts of one prompt with its n sequences. `arrived` is on the clock of time.perf_counter()."""

    def __init__(self, metrics: ServerMetrics, *, arrived: float, prompt_tokens: int, n: int, max_tokens: int) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._prompt_tokens = prompt_tokens
        self._sequences = [_Sequence() for _ in range(n)]
        self._answered = False
        metrics.request_prompt_tokens.observe(prompt_tokens)
        metrics.request_n.observe(n)
        metrics.request_max_tokens.observe(max_tokens)

    def add(self, delta: SequenceDelta) -> None:
        """Take one delta's tokens, and its end where it is one."""
        metrics = self._metrics
        now = time.perf_counter()
        if not self._answered:
            self._answered = True
            # Sequences after the first share its pages, which is no prefix hit.
            cached = delta.cached_tokens or 0
            metrics.prompt_tokens.inc(self._prompt_tokens)
            metrics.prompt_tokens_cached.inc(cached)
            metrics.request_computed_tokens.observe(self._prompt_tokens - cached)
        sequence = self._sequences[delta.index]
        count = len(delta.token_ids)
        if count:
            metrics.generation_tokens.inc(count)
            if sequence.tokens == 0:
                sequence.first = now
                metrics.ttft.observe(now - self._arrived)
            else:
                metrics.itl.observe(now - sequence.last)
            sequence.last = now
            sequence.tokens += count
        if delta.finish_reason is not None:
            self._finish(sequence, delta.finish_reason, delta.timing, now)

    def _finish(self, sequence: _Sequence, reason: str, timing: RequestTiming | None, now: float) -> None:
        metrics = self._metrics
        metrics.finished.get(reason, metrics.finished["error"]).inc()
        metrics.e2e.observe(now - self._arrived)
        metrics.request_generation_tokens.observe(sequence.tokens)
        if sequence.tokens > 1:
            metrics.tpot.observe((sequence.last - sequence.first) / (sequence.tokens - 1))
        if timing is not None:
            metrics.queue_time.observe(timing.queued)
            metrics.prefill_time.observe(timing.prefill)
            metrics.decode_time.observe(timing.decode)
            metrics.inference_time.observe(timing.prefill + timing.decode)
            metrics.request_preemptions.observe(timing.preemptions)
