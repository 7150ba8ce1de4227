"""An engine driven step by step, with the front end's own text side, so that tests decide what happens when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.config.placement import parse_placement
from hardpoint.engine.build import build_engine
from hardpoint.engine.loop import Engine
from hardpoint.frontend.output import OutputProcessor, TokenTexts
from hardpoint.frontend.requests import complete, expand
from hardpoint.frontend.tokenizer import Tokenizer, load_tokenizer
from hardpoint.protocol.messages import RequestTiming
from hardpoint.request.output import PositionLogprobs
from hardpoint.request.sampling import SamplingParams
from hardpoint.request.validation import RequestLimits, validate, validate_prompt
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint_platforms.streams import Clock

#: Models that the strict device has traced in this process: their steps need no second look.
_TRACED: set[Path] = set()
#: Steps after which a run counts as hung.
PATIENCE = 5000


class ManualClock(Clock):
    """Time passes only when a test says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@dataclass
class Answer:
    """What one sequence has brought so far. `pieces`: text of each delta, as a stream shows it."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    error: str | None = None
    error_kind: str | None = None
    timing: RequestTiming | None = None

    @property
    def text(self) -> str:
        """All text."""
        return "".join(self.pieces)

    @property
    def preemptions(self) -> int:
        """How often it lost its pages. Known at the end."""
        return 0 if self.timing is None else self.timing.preemptions


@dataclass
class _Live:
    processor: OutputProcessor
    answers: list[Answer]


def engine_config(
    folder: Path,
    *,
    device: str = "reference",
    overlap: bool = True,
    pages: int = 256,
    page_tokens: int = 16,
    budget: int | None = None,
    max_num_seqs: int = 64,
    chunked_prefill: bool = True,
    policy: str = "fcfs",
    prefix_caching: bool = True,
    max_model_len: int | None = None,
    overrides: dict[str, Any] | None = None,
) -> EngineConfig:
    """A configuration in fp32, small unless told otherwise. `device` may be a placement."""
    placement = parse_placement(device) if "=" in device else None
    exact = "exact" if "cpu" in device else None
    options: dict[str, Any] = {}
    if device == "strict":
        first = folder not in _TRACED  # of its model: each further engine would build and trace the same once more
        options.update(trace=first, shapes="each" if first else "full")
        _TRACED.add(folder)
        budget = None if budget is None else max(budget, 16)  # its smallest chunk
    return EngineConfig(
        ModelConfig(str(folder), dtype="float32", max_model_len=max_model_len, overrides=overrides or {}),
        # Compared with float32: rounding activations to int8 is another test's matter (tests/reference/real).
        DeviceConfig("auto" if placement else device, options, numerics=exact, placement=placement),
        CacheConfig(page_tokens=page_tokens, num_kv_pages=pages, prefix_caching=prefix_caching),
        SchedulerConfig(
            max_batch_tokens=budget,
            max_num_seqs=max_num_seqs,
            chunked_prefill=chunked_prefill,
            policy=policy,
            overlap=overlap,
        ),
    )


class Driver:
    """Owns one engine. Checks its integrity as it goes; closes it in a `with` block."""

    def __init__(self, folder: Path, *, clock: Clock | None = None, **settings: Any) -> None:
        config = engine_config(folder, **settings)
        built = build_engine(config)
        self.info = built.info
        self.tokenizer: Tokenizer = load_tokenizer(config.model)
        self.scheduler: Scheduler = built.engine._scheduler
        # the same scheduler and executor, with seeds that repeat and with the test's own clock
        self.engine = Engine(
            self.scheduler, built.engine._executor, overlap=config.scheduler.overlap, clock=clock, seed=1
        )
        self.limits = RequestLimits(self.info.vocab_size, self.info.max_model_len, max_n=1000, max_stop_strings=100)
        self._texts = TokenTexts(self.tokenizer)
        self._numbers = itertools.count()
        self._live: dict[str, _Live] = {}
        self.steps = 0

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def submit(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams,
        *,
        name: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> list[Answer]:
        """Check and queue a request; its n answers fill up as steps run."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        validate(params, self.limits)
        validate_prompt(ids, params, self.limits)
        params = complete(params, self.tokenizer)
        name = name or f"r{next(self._numbers)}"
        live = _Live(OutputProcessor(self.tokenizer, ids, params, self._texts), [Answer() for _ in range(params.n)])
        self._live[name] = live
        for child in expand(ids, params, request_id=name, priority=priority, deadline=deadline, cache_salt=cache_salt):
            self.engine.add(child)
        return live.answers

    def abort(self, name: str) -> None:
        """As when the client has gone away."""
        live = self._live.pop(name, None)
        if live is not None:
            for index in live.processor.unfinished():
                self.engine.abort(f"{name}#{index}")

    def step(self) -> None:
        """One step of the engine, what it brought, and every now and then a look at all invariants."""
        self.steps += 1
        for output in self.engine.step().outputs:
            name, _, index = output.request_id.rpartition("#")
            live = self._live.get(name)
            if live is None:
                continue
            answer = live.answers[int(index)]
            answer.error_kind = answer.error_kind or output.error_kind
            delta = live.processor.process(int(index), output)
            if delta is None:
                continue
            answer.token_ids += delta.token_ids
            answer.pieces.append(delta.text)
            answer.logprobs += delta.logprobs or ()
            if delta.prompt_logprobs is not None:
                assert answer.prompt_logprobs is None, "prompt log-probabilities came twice"
                answer.prompt_logprobs = list(delta.prompt_logprobs)
            if delta.cached_tokens is not None:
                answer.cached_tokens = delta.cached_tokens
            if delta.finish_reason is not None:
                answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
                answer.error, answer.timing = delta.error, delta.timing
                if output.finish_reason is None:
                    self.engine.abort(output.request_id)
        if self.steps % 4 == 0 or not self.engine.has_work:
            self.scheduler.check_integrity()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until nothing is left to do (or `until` says so)."""
        for _ in range(PATIENCE):
            if not self.engine.has_work or (until is not None and until()):
                return
            self.step()
        raise AssertionError(f"no end after {PATIENCE} steps: {self.engine.stats()}")

    def ask(self, prompt: Sequence[int] | str, params: SamplingParams, **how: Any) -> list[Answer]:
        """Submit one request and run everything to its end."""
        answers = self.submit(prompt, params, **how)
        self.run()
        assert all(answer.finish_reason for answer in answers)
        return answers

    def ask_one(self, prompt: Sequence[int] | str, params: SamplingParams, **how: Any) -> Answer:
        """`ask` for n = 1."""
        (answer,) = self.ask(prompt, params, **how)
        return answer

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold now."""
        return self.scheduler.pager.used_pages

    def cold(self) -> Driver:
        """Itself, with an empty prefix cache."""
        self.engine.reset_prefix_cache()
        return self


def assert_same(got: Answer, wanted: Answer, tolerance: float = 1e-4) -> None:
    """Equal ids, text and reasons; log-probabilities within `tolerance`."""
    assert got.token_ids == wanted.token_ids
    assert got.text == wanted.text
    assert (got.finish_reason, got.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
    assert_same_logprobs(got.logprobs, wanted.logprobs, tolerance)
    assert (got.prompt_logprobs is None) == (wanted.prompt_logprobs is None)
    if got.prompt_logprobs is not None and wanted.prompt_logprobs is not None:
        assert_same_logprobs(got.prompt_logprobs, wanted.prompt_logprobs, tolerance)


def assert_same_logprobs(
    got: Sequence[PositionLogprobs | None], wanted: Sequence[PositionLogprobs | None], tolerance: float = 1e-4
) -> None:
    """Position by position: the same candidates with the same values."""
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert list(ours) == list(theirs)
        for token, entry in ours.items():
            assert abs(entry.logprob - theirs[token].logprob) <= tolerance
            assert entry.decoded_token == theirs[token].decoded_token
            # two neighbours in rank may be closer than rounding
            assert abs((entry.rank or 0) - (theirs[token].rank or 0)) <= 1
