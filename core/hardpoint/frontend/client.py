"""The engine as callers see it: submit, stream, abort. One interface, whether the engine lives here or elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from hardpoint.protocol.messages import EngineInfo, EngineStats
from hardpoint.request.output import SequenceDelta
from hardpoint.request.sampling import SamplingParams


class EngineClient(ABC):
    """Owns the connection to one engine and the text side of its requests (detokenizing, stop strings)."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """What the engine turned out to be. Valid after `start`."""

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """The latest gauges and counters."""

    @abstractmethod
    async def start(self) -> None:
        """Wait until the engine serves. Raises what its start-up raised (HardpointError)."""

    @abstractmethod
    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> AsyncIterator[SequenceDelta]:
        """Stream one request: n sequences, interleaved; ends when all n have a finish reason.

        Closing the iterator early (or cancelling the task) aborts the request and frees its pages.
        deadline: seconds from now, then it ends with reason `timeout`. Raises RequestError before the first delta for a
        text with a lone surrogate, a priority that the policy ignores, constraints that leave no token to draw, and
        what only the engine can see; EngineDead at any time.
        `params` must have passed `hardpoint.request.validation.validate`.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request; its stream finishes with reason `abort`. Unknown ids are ignored."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDead if the engine is gone or shows no life, EngineBusy if it is not ready."""

    @property
    def gone(self) -> bool:
        """Whether the engine is dead for good; one that only shows no life may come back."""
        return False

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget cached pages that no request uses."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine. Running requests are aborted."""
