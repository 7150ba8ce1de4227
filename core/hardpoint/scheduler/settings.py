"""What the scheduler must obey: the user's settings, and the device's limits as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from hardpoint.errors import ConfigError

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class StepLimits:
    """What one step may hold: the device's `BatchLimits`, field by field, free of torch.

    Attributes:
        max_tokens: tokens of all requests together.
        max_requests: requests in one step.
        mixed: whether rows of one token (decodes) and of several (prefills) may share a step.
        max_prefill_requests: requests with more than one token in one step.
        prefill_chunk_multiple: a chunk that does not reach the request's last known token is a multiple of this.
        token_buckets, request_buckets: the only counts a step may be padded to, ascending; empty for any.
    """

    max_tokens: int | None = None
    max_requests: int | None = None
    mixed: bool = True
    max_prefill_requests: int | None = None
    prefill_chunk_multiple: int = 1
    token_buckets: tuple[int, ...] = ()
    request_buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class SchedulerSettings:
    """Settings of one scheduler. Raises ConfigError for those that cannot be.

    Attributes:
        max_batch_tokens: token budget of a step.
        max_num_seqs: rows of the worker's tables; requests that run at once.
        max_waiting: requests that may queue.
        chunked_prefill: whether a prompt may be spread over steps. Where it may not, only a request that was preempted
            and has grown past the budget is.
        policy: fcfs or priority.
        max_model_len: longest sequence, in tokens.
        limits: the device's.
    """

    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_waiting: int = 8192
    chunked_prefill: bool = True
    policy: str = "fcfs"
    limits: StepLimits = field(default_factory=StepLimits)

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_num_seqs", "max_model_len", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}: must be at least 1")
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy is {self.policy!r}: must be one of {', '.join(POLICIES)}")
        limits = self.limits
        if limits.prefill_chunk_multiple < 1 or (limits.max_prefill_requests or 1) < 1:
            raise ConfigError(f"the device declares batch limits that allow nothing: {limits}")
        if self.budget < self.min_chunk or (limits.max_requests or 1) < 1:
            raise ConfigError(
                f"--max-batch-tokens: {self.budget} tokens per step (by this setting or the device's "
                f"limits) are fewer than the smallest prefill chunk of this device, {self.min_chunk}"
            )

    @property
    def budget(self) -> int:
        """Tokens one step may hold, by all limits."""
        limits = self.limits
        most = self.max_batch_tokens if limits.max_tokens is None else min(self.max_batch_tokens, limits.max_tokens)
        return min(most, limits.token_buckets[-1]) if limits.token_buckets else most

    @property
    def min_chunk(self) -> int:
        """Fewest tokens of a chunk that does not reach the last known token."""
        return max(self.limits.prefill_chunk_multiple, 1 if self.limits.mixed else 2)

    @property
    def prefill_slots(self) -> int:
        """Requests with more than one token that one step may hold."""
        most = self.limits.max_prefill_requests
        return self.max_rows if most is None else most

    @property
    def max_rows(self) -> int:
        """Requests that run at once: so few that all can decode in one step, and a prefill still gets a chunk."""
        limits = self.limits
        most = min(self.max_num_seqs, self.budget - (self.min_chunk - 1 if limits.mixed else 0))
        if limits.max_requests is not None:
            most = min(most, limits.max_requests)
        return min(most, limits.request_buckets[-1]) if limits.request_buckets else most

    def chunk(self, want: int, room: int) -> int:
        """Tokens to compute now of `want`, where `room` fit; 0 if none may be."""
        if want <= room:
            return want
        if room < 1 or (not self.chunked_prefill and want <= self.budget):
            return 0
        room -= room % self.limits.prefill_chunk_multiple
        return room if room >= self.min_chunk else 0
