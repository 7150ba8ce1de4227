"""What front end and engine say to each other. Plain data, encoded with msgpack.

Front end to engine: `Submit`, `Abort`, `ResetPrefixCache`, `Shutdown`. Engine to front end: `Ready`, `Outputs`,
`Heartbeat`, `Failure`.
"""

from __future__ import annotations

import msgspec

from hardpoint.request.sampling import SamplingParams

#: Both sides must agree; carried in `Ready`.
PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything that crosses."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. A request with n > 1 is n of these, children naming their `parent`.

    Attributes:
        request_id: unique among live requests.
        prompt: token ids.
        params: checked; n is ignored here. seed is already the sequence's own, or None.
        priority: lower is earlier.
        deadline: seconds from submission after which the request ends with finish reason "timeout"; None for never.
        cache_salt: requests share cached prefixes only under the same salt.
        parent: request_id whose prompt pages this one shares; it waits for the parent's prompt.
        arrival: time.time() at the front end.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    parent: str | None = None
    arrival: float = 0.0


class Submit(Message, frozen=True):
    """Take these requests."""

    requests: list[EngineRequest]


class Abort(Message, frozen=True):
    """Drop these; they end with finish reason `abort` and no further output."""

    request_ids: list[str]


class ResetPrefixCache(Message, frozen=True):
    """Forget every cached page that no request uses."""


class Shutdown(Message, frozen=True):
    """Stop at once. Requests still running are aborted."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position.

    `token_ids[0]` is the token drawn (or of the prompt); the rest are the top ones, best first.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought to one request.

    Attributes:
        request_id: whose.
        token_ids: new tokens, in order. A stop token is among them.
        logprobs: one per new token, if asked.
        prompt_logprobs: one per prompt token, the first None; comes once, whole.
        finish_reason: stop, length, abort, timeout or error; None while it goes on.
        stop_reason: the stop token, where one ended it and it is not an end-of-sequence token.
        error: message for finish reason `error`.
        error_kind: of a request that was refused at admission: the name of the error in `hardpoint.errors`, which the
            front end raises.
        error_field: likewise, the request's field at fault.
        cached_tokens: prompt tokens found in the prefix cache; sent with the first output.
        timing: sent with the last output.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    cached_tokens: int | None = None
    timing: RequestTiming | None = None
    error_kind: str | None = None
    error_field: str | None = None


class RequestTiming(msgspec.Struct, frozen=True, array_like=True):
    """Seconds within the engine: in the queue, until the first token, from there to the last; and preemptions."""

    queued: float
    prefill: float
    decode: float
    preemptions: int


#: Upper bounds of the classes in which `EngineStats.step_sizes` counts steps, in tokens; one class more has no bound.
STEP_SIZE_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Gauges as they are now, and counters since start.

    Attributes:
        step_sizes: steps by the tokens computed in them, one count per class of STEP_SIZE_BOUNDS and one for those
            above; empty before the first step.
        step_tokens: tokens computed in all steps.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    schedule_seconds: float = 0.0
    fallback_ops: int = 0
    step_sizes: tuple[int, ...] = ()
    step_tokens: int = 0


class Outputs(Message, frozen=True):
    """Results of one step, and the gauges after it."""

    outputs: list[TokenOutput]
    stats: EngineStats


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine turned out to be, for the start-up story, `/v1/models` and metrics.

    Attributes:
        device, device_name: "cpu:0" and what people call it.
        device_reason: why this device.
        tuning: (name, value, reason) of choices made for this machine.
        dtype, kv_dtype: names.
        weight_bytes, kv_bytes: memory.
        num_pages, page_tokens: of the KV cache, page 0 not counted.
        max_model_len: longest sequence.
        max_concurrency: sequences of max_model_len that fit at once.
        vocab_size: rows of the logits.
        ops: (provider, count) of bound ops.
        fallbacks: one line per op that fell back, with the reason.
        phases: (name, seconds) of start-up.
        default_sampling: fields of SamplingParams that requests get where they say nothing.
        policy: the scheduler's, fcfs or priority.
        prefix_caching: whether pages of finished requests are kept and shared.
        max_logprobs, max_biased_tokens: what a request may ask at most where the device's programs have fixed shapes:
            top log-probabilities, and tokens that logit_bias, min_tokens and bad_words touch. None for no limit.
    """

    device: str
    device_name: str
    device_reason: str
    tuning: list[tuple[str, str, str]]
    dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes: int
    num_pages: int
    page_tokens: int
    max_model_len: int
    max_concurrency: float
    vocab_size: int
    ops: list[tuple[str, int]]
    fallbacks: list[str]
    phases: list[tuple[str, float]]
    default_sampling: dict[str, float] = {}
    policy: str = "fcfs"
    prefix_caching: bool = True
    max_logprobs: int | None = None
    max_biased_tokens: int | None = None


class Ready(Message, frozen=True):
    """The engine serves."""

    protocol: int
    info: EngineInfo


class Progress(Message, frozen=True):
    """Start-up goes on: a phase's name and the share done, for the front end's progress bar."""

    phase: str
    done: float


class Heartbeat(Message, frozen=True):
    """Still alive. `busy_for`: seconds since the loop last came round, 0 when idle."""

    busy_for: float


class Failure(Message, frozen=True):
    """The engine gives up. `message` and `hint` are for people; `kind` is the error's class name."""

    message: str
    hint: str | None = None
    kind: str = "EngineError"


ToEngine = Submit | Abort | ResetPrefixCache | Shutdown
FromEngine = Ready | Progress | Outputs | Heartbeat | Failure
