"""Random traces: settings, requests, arrivals, aborts, deadlines; and a player that checks everything at each step."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from kv_device import KvDevice, solo

from hardpoint.engine.update import apply
from hardpoint.errors import PromptTooLong, RequestError, TooManyRequests
from hardpoint.kv.pager import KVPager
from hardpoint.protocol.messages import EngineRequest, TokenOutput
from hardpoint.request.request import Request
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import StepPlan, StepResult
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings, StepLimits

VOCAB = 7
WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (None,), (None, 5), (3,), (None, 2, 6), (None, None)]


@dataclass
class Trace:
    """depth: results that may be outstanding when the next step is scheduled. resets: ticks with a cache reset."""

    settings: SchedulerSettings
    windows: tuple[int | None, ...]
    page_tokens: int
    num_pages: int
    prefix_caching: bool
    depth: int
    arrivals: dict[int, list[EngineRequest]]
    aborts: dict[int, list[str]]
    resets: frozenset[int]
    poisoned: frozenset[str]


@dataclass
class Outcome:
    """What a trace came to."""

    refused: dict[str, RequestError] = field(default_factory=dict)
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    preemptions: int = 0
    hits: int = 0
    steps: int = 0


def random_settings(rng: random.Random, tight: bool) -> SchedulerSettings:
    limits = StepLimits()
    if rng.random() < (0.1 if tight else 0.4):
        limits = StepLimits(
            max_tokens=rng.choice([None, None, 8, 40]),
            max_requests=rng.choice([None, None, 1, 3]),
            mixed=rng.random() < 0.5,
            max_prefill_requests=rng.choice([None, 1, 2]),
            prefill_chunk_multiple=rng.choice([1, 1, 2, 4]),
            token_buckets=rng.choice([(), (), (4, 8, 16)]),
            request_buckets=rng.choice([(), (), (2, 4)]),
        )
    return SchedulerSettings(
        max_batch_tokens=rng.choice([4, 7, 16, 64]),
        max_num_seqs=rng.choice([4, 8] if tight else [1, 2, 4, 8]),
        max_model_len=24 if tight else rng.choice([12, 30, 60]),
        max_waiting=rng.choice([3, 50, 50, 50]),
        chunked_prefill=rng.random() < 0.8,
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
        limits=limits,
    )


def random_params(rng: random.Random, seed: int, tight: bool) -> SamplingParams:
    kind = rng.random()
    if tight and kind < 0.8:
        return SamplingParams(
            seed=seed,
            max_tokens=rng.choice([None, 12, 20]),
            logprobs=0 if kind < 0.1 else None,
            prompt_logprobs=1 if kind > 0.5 else None,
        )
    return SamplingParams(
        seed=seed,
        max_tokens=rng.choice([None, 1, 3, 8, 20, 0 if kind < 0.1 else 5]),
        min_tokens=rng.choice([0, 0, 2]),
        eos_token_ids=rng.choice([(), (0,)]),
        stop_token_ids=rng.choice([(), (), (3,)]),
        ignore_eos=rng.random() < 0.3,
        prompt_logprobs=rng.choice([0, 1]) if kind < 0.2 else None,
        logprobs=rng.choice([0, 1]) if 0.1 < kind < 0.3 else None,
    )


def random_requests(rng: random.Random, policy: str, tight: bool) -> list[EngineRequest]:
    """Prompts with common beginnings, follow-up turns, and sequences with children."""
    stems = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
    requests: list[EngineRequest] = []
    for number in range(rng.randint(2, 4) if tight else rng.randint(1, 4)):
        prompt = rng.choice(stems)[: rng.choice([0, 1, 2, 4, 11] if tight else [0, 4, 8, 9, 16, 24])]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 1, 3, 7]))]
        salt = rng.choice(["", "", "", "tenant"])
        if requests and rng.random() < 0.25:
            earlier = rng.choice(requests)
            salt = earlier.cache_salt
            answer, _ = solo(earlier.prompt, earlier.params, salt, VOCAB, earlier.params.max_tokens or 6)
            prompt = earlier.prompt + answer + prompt[:2]
        params = random_params(rng, number, tight)
        priority = rng.randint(-1, 1) if policy == "priority" or rng.random() < 0.1 else 0
        for child in range(rng.choice([1, 1, 1, 1, 3])):
            requests.append(
                EngineRequest(
                    request_id=f"r{number}#{child}",
                    prompt=prompt,
                    params=params if not child else random_params(rng, 100 * child + number, tight),
                    priority=priority,
                    deadline=float(rng.randint(0, 30)) if rng.random() < 0.1 else None,
                    cache_salt=salt,
                    parent=f"r{number}#0" if child else None,
                )
            )
    return requests


def random_trace(seed: int) -> Trace:
    """The same trace for the same seed, in every process. Two of five are tight: long outputs, hardly any pages."""
    rng = random.Random(seed)
    tight = rng.random() < 0.4
    settings = random_settings(rng, tight)
    windows = rng.choice(WINDOWS)
    page_tokens = rng.choice([1, 2, 4] if tight else [1, 2, 4, 4, 8])
    least = 3 * len(windows) + -(-settings.min_chunk // page_tokens) * len(windows)
    roomy = -(-settings.max_model_len // page_tokens) * len(windows)
    arrivals: dict[int, list[EngineRequest]] = {}
    aborts: dict[int, list[str]] = {}
    tick, poisoned = 0, set()
    requests = random_requests(rng, settings.policy, tight)
    for request in requests:
        if not request.parent:
            tick += rng.choice([0, 0, 0, 1, 4])
        arrivals.setdefault(tick, []).append(request)
        if rng.random() < 0.12:
            aborts.setdefault(tick + rng.randint(0, 12), []).append(request.request_id)
        if rng.random() < 0.03:
            poisoned.add(request.request_id)
    return Trace(
        settings=settings,
        windows=windows,
        page_tokens=page_tokens,
        num_pages=1
        + max(least, rng.choice([roomy // 2, roomy, roomy + 2] if tight else [0, roomy // 2, roomy, 4 * roomy])),
        prefix_caching=rng.random() < 0.75,
        depth=rng.choice([0, 0, 1, 1, 2]),
        arrivals=arrivals,
        aborts=aborts,
        resets=frozenset({rng.randint(2, 12)} if rng.random() < 0.1 else ()),
        poisoned=frozenset(poisoned),
    )


def play(trace: Trace) -> Outcome:
    """Run a trace to its end, with `check_integrity` at every step, and check what it came to."""
    pager = KVPager(trace.num_pages, trace.page_tokens, trace.windows, trace.prefix_caching)
    scheduler = Scheduler(trace.settings, pager)
    everyone = [request for group in trace.arrivals.values() for request in group]
    device = KvDevice(
        trace.settings,
        trace.windows,
        trace.page_tokens,
        trace.num_pages,
        vocab=VOCAB,
        salts={request.request_id: request.cache_salt for request in everyone},
        poisoned=trace.poisoned,
    )
    outcome, pending = Outcome(), deque[tuple[StepPlan, StepResult]]()
    requests: dict[str, Request] = {}
    bound = 60 + max(trace.arrivals) + 8 * sum(len(r.prompt) + trace.settings.max_model_len for r in everyone)
    tick = -1
    while tick < max(trace.arrivals) or scheduler.has_work:
        tick += 1
        assert tick < bound, "somebody starves"
        for message in trace.arrivals.get(tick, ()):
            _add(scheduler, message, float(tick), requests, outcome)
        for name in trace.aborts.get(tick, ()):
            alive = name in scheduler.requests
            assert scheduler.abort(name) is alive
        if tick in trace.resets:
            scheduler.reset_prefix_cache()
        assert all(r.finish_reason == "timeout" for r in scheduler.expire(float(tick)))
        plan = scheduler.schedule(float(tick))
        if tick % 4 == 0:
            scheduler.check_integrity()
        if plan is not None:
            assert plan.page_tables[0].base is None, "tables are copies"
            pending.append((plan, device.run(plan)))
            outcome.steps += 1
        if pending and (plan is None or len(pending) > trace.depth):
            for output in apply(scheduler, *pending.popleft(), float(tick)):
                outcome.outputs[output.request_id].append(output)
        scheduler.check_integrity()
    assert not pending
    assert pager.used_pages == 0, "pages are lost"
    assert pager.free_pages + pager.cached_pages == pager.usable_pages
    outcome.preemptions, outcome.hits = scheduler.preemptions, pager.hits
    for request in requests.values():
        _check_request(trace, request, outcome.outputs[request.id], scheduler)
    return outcome


def _add(
    scheduler: Scheduler, message: EngineRequest, now: float, requests: dict[str, Request], outcome: Outcome
) -> None:
    request = Request.from_message(message, now)
    outcome.outputs[request.id] = []
    waiting = scheduler.num_waiting
    try:
        scheduler.add(request)
    except RequestError as error:
        outcome.refused[request.id] = error
        _check_refusal(scheduler, request, error, waiting)
    else:
        requests[request.id] = request


def _check_refusal(scheduler: Scheduler, request: Request, error: RequestError, waiting: int) -> None:
    settings, length = scheduler.settings, request.prompt_length
    if isinstance(error, TooManyRequests):
        assert waiting >= settings.max_waiting
    elif isinstance(error, PromptTooLong):
        unchunked = not settings.chunked_prefill and length > settings.budget
        assert length >= settings.max_model_len or length > scheduler.admission.capacity or unchunked
        assert error.field in ("prompt", "max_tokens")
    else:
        assert (length, error.field) == (0, "prompt")


def _check_request(trace: Trace, request: Request, outputs: list[TokenOutput], scheduler: Scheduler) -> None:
    """Tokens as alone, one end, each log-probability in its place."""
    tokens = [token for output in outputs for token in output.token_ids]
    most = min(trace.settings.max_model_len, scheduler.admission.capacity + 1) - request.prompt_length
    if request.params.max_tokens is not None:
        most = min(most, request.params.max_tokens)
    expected, reason = solo(request.prompt.tolist(), request.params, request.cache_salt, VOCAB, most)
    assert request.finished
    assert request.output == tokens
    if request.finish_reason in ("abort", "timeout"):
        assert tokens == expected[: len(tokens)]
        assert all(output.finish_reason is None for output in outputs)
    elif request.id in trace.poisoned and most > 0:
        assert (tokens, request.finish_reason) == ([], "error")
    else:
        assert (tokens, request.finish_reason) == (expected, reason)
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [reason]
        _check_extras(request, outputs)
    if request.cached_tokens is not None:
        assert 0 <= request.cached_tokens < request.prompt_length


def _check_extras(request: Request, outputs: list[TokenOutput]) -> None:
    assert outputs[0].cached_tokens == request.cached_tokens
    assert all(output.cached_tokens is None for output in outputs[1:])
    assert outputs[-1].timing is not None
    if request.params.logprobs is not None:
        entries = [entry for output in outputs for entry in output.logprobs or ()]
        assert [entry.token_ids[0] for entry in entries] == request.output
        assert [entry.rank for entry in entries] == [request.prompt_length + i for i in range(len(entries))]
        assert all(len(entry.token_ids) == 1 + request.params.logprobs for entry in entries)
    wholes = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(wholes) == (request.params.prompt_logprobs is not None)
    for whole in wholes:
        assert whole[0] is None
        assert [entry.token_ids[0] for entry in whole[1:] if entry] == request.prompt.tolist()[1:]
        assert [entry.rank for entry in whole[1:] if entry] == list(range(1, request.prompt_length))
