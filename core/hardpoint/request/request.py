"""A request inside the engine: what was asked, what exists so far, and where in its life it is.

    PARKED --parent's prompt is there--> WAITING --scheduled--> RUNNING --preempted--> PREEMPTED
                                            \\                   ^   |                  |
                                             \\                  +---|----scheduled-----+
                                              +----> FINISHED <------+  (stop, length, abort, timeout, error)

While it runs, its counters (computed, known, steps in flight) are in the scheduler's row table, where a whole batch is
updated at once; otherwise nothing of it is computed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from hardpoint.errors import EngineError
from hardpoint.kv.prefix_cache import HashChain
from hardpoint.protocol.messages import EngineRequest, RequestTiming, TokenLogprobs
from hardpoint.request.sampling import SamplingParams

Int32s = npt.NDArray[np.int32]


class Status(Enum):
    """Where in its life a request is."""

    PARKED = "parked"  # waits until its parent's prompt is computed
    WAITING = "waiting"
    RUNNING = "running"  # has a row
    PREEMPTED = "preempted"  # waits again; keeps its tokens, not its pages
    FINISHED = "finished"


_NEXT: dict[Status, frozenset[Status]] = {
    Status.PARKED: frozenset({Status.WAITING, Status.FINISHED}),
    Status.WAITING: frozenset({Status.PARKED, Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. Changed only by the scheduler and by `engine.update`.

    Attributes:
        id: unique among live requests.
        prompt: int32 [prompt_length], not empty.
        params: as asked, with a seed (drawn here if none was given).
        priority: lower is earlier.
        arrival: seconds, on the engine's clock.
        deadline_at: on the same clock, or None.
        cache_salt: see `kv.prefix_cache`.
        parent: id of the request whose prompt pages it shares, or None.
        output: tokens generated and known here.
        key: order among requests (set by the scheduler's policy).
        row: its row while it runs, else -1.
        in_flight: steps with it that have no result yet, while it is preempted.
        max_total: most tokens, prompt and output, it can come to (set at admission).
        cached_tokens: prompt tokens found in the cache when it first ran; None before.
    """

    id: str
    prompt: Int32s
    params: SamplingParams
    priority: int = 0
    arrival: float = 0.0
    deadline_at: float | None = None
    cache_salt: str = ""
    parent: str | None = None
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    key: tuple[int, int] = (0, 0)
    row: int = -1
    in_flight: int = 0
    max_total: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished_at: float | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    prompt_logprobs_sent: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_length: int = field(init=False)
    max_output: int = field(init=False, default=0)
    stop_ids: frozenset[int] = field(init=False)
    eos_ids: frozenset[int] = field(init=False)
    plain: bool = field(init=False)
    _chain: HashChain = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = np.ascontiguousarray(self.prompt, dtype=np.int32)
        self.prompt_length = len(self.prompt)
        params = self.params
        if params.seed is None:
            self.params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        self.eos_ids = frozenset() if params.ignore_eos else frozenset(params.eos_token_ids)
        self.stop_ids = self.eos_ids | frozenset(params.stop_token_ids)
        self.plain = params.logprobs is None and params.prompt_logprobs is None
        self._chain = HashChain(self.cache_salt)

    @classmethod
    def from_message(cls, message: EngineRequest, now: float) -> Request:
        """Build it from what the front end sent. now: the engine's clock, in seconds.

        Time since the front end took the request counts as waited.
        """
        waited = max(0.0, time.time() - message.arrival) if message.arrival else 0.0
        arrival = now - waited
        return cls(
            id=message.request_id,
            prompt=np.asarray(message.prompt, dtype=np.int32),
            params=message.params,
            priority=message.priority,
            arrival=arrival,
            deadline_at=None if message.deadline is None else arrival + message.deadline,
            cache_salt=message.cache_salt,
            parent=message.parent,
        )

    @property
    def known(self) -> int:
        """Tokens known here: prompt and output, without those in flight."""
        return self.prompt_length + len(self.output)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.status is Status.FINISHED

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be collected: its whole prompt must be computed."""
        return self.params.prompt_logprobs is not None and not self.prompt_logprobs_sent

    def move(self, status: Status) -> None:
        """Go on in life. Raises EngineError for a step that the picture above does not have."""
        if status not in _NEXT[self.status]:
            raise EngineError(f"request {self.id}: {self.status.value} cannot become {status.value}")
        self.status = status

    def tokens(self, start: int, stop: int) -> Int32s:
        """int32: known tokens [start, stop)."""
        length = self.prompt_length
        if stop <= length:
            return self.prompt[start:stop]
        output = np.array(self.output[max(start - length, 0) : stop - length], dtype=np.int32)
        return output if start >= length else np.concatenate([self.prompt[start:], output])

    def digests(self, columns: int, page_tokens: int) -> Sequence[bytes]:
        """Digests of at least the first `columns` full pages; their tokens must be known."""
        have = len(self._chain.digests)
        if have < columns:
            self._chain.extend(self.tokens(have * page_tokens, columns * page_tokens), page_tokens)
        return self._chain.digests

    def timing(self) -> RequestTiming:
        """Where its time went; 0 for what it never came to."""
        end = self.finished_at if self.finished_at is not None else self.arrival
        scheduled = end if self.first_scheduled is None else self.first_scheduled
        token = end if self.first_token is None else self.first_token
        return RequestTiming(
            queued=max(0.0, scheduled - self.arrival),
            prefill=max(0.0, token - scheduled),
            decode=max(0.0, end - token),
            preemptions=self.preemptions,
        )
