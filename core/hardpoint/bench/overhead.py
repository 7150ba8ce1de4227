"""`hardpoint bench overhead`: where a decode step's time goes besides the device, with the real engine in this process.

Calls of the engine's parts are timed from outside; the engine itself measures nothing more than it always does. Steps
run one after another, so that a part's time is its own and not that of a part that runs beside it.

    schedule   scheduler and pager make a plan
    batch      the plan becomes host arrays and the device's inputs; drawn ids are kept for the next step
    device     the device's program; with a device that runs behind its launch, `collect` has the rest of it
    collect    results come to the host
    update     drawn tokens are noted, requests end
    text       tokens become text (frontend/output.py)
    rest       the loop itself: threads, gauges, messages
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hardpoint.config.engine import EngineConfig
from hardpoint.engine.build import build_engine
from hardpoint.engine.loop import Engine
from hardpoint.errors import EngineError
from hardpoint.frontend.output import OutputProcessor, TextTokenizer, TokenTexts
from hardpoint.frontend.tokenizer import load_tokenizer
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams

PARTS = ("schedule", "batch", "device", "collect", "update", "text", "rest")
#: Milliseconds besides the device that a step may take, by running requests.
GOALS: Mapping[int, float] = {1: 1.0, 32: 2.0}
#: Decode steps before those that count.
_WARM_UP = 10


@dataclass(frozen=True)
class StepParts:
    """Medians over the decode steps of one crowd.

    Attributes:
        requests: running; steps: measured.
        parts: milliseconds per step, by name of PARTS.
        besides: all of a step but the device's part, the median of the sums.
        whole: milliseconds of the whole step.
    """

    requests: int
    steps: int
    parts: Mapping[str, float]
    besides: float
    whole: float

    @property
    def goal(self) -> float | None:
        """Milliseconds for `besides`; None for crowds without a goal."""
        return GOALS.get(self.requests)

    @property
    def goal_met(self) -> bool:
        """Whether `besides` stays below it; True where there is none."""
        return self.goal is None or self.besides <= self.goal


class Ledger:
    """Seconds per part of the step under way. Parts may call parts; each counts its own time alone.

    Parts that run on another thread count as if they ran here: the caller waits for them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.spent: dict[str, float] = {}
        self._clock = clock
        self._inner: list[float] = []

    def start_step(self) -> None:
        """Forget the step before."""
        self.spent = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts for `part`, without that of parts that it calls."""

        def run(*args: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            started = self._clock()
            try:
                return function(*args, **named)
            finally:
                taken = self._clock() - started
                self.spent[part] = self.spent.get(part, 0.0) + taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        return run

    def wrap(self, owner: object, method: str, part: str) -> None:
        """Time a method of one object."""
        setattr(owner, method, self.timed(part, getattr(owner, method)))


def run(
    config: EngineConfig,
    crowds: Sequence[int],
    *,
    steps: int = 100,
    input_len: int = 32,
    tokenizer: TextTokenizer | None = None,
) -> list[StepParts]:
    """Measure `steps` decode steps of each number of running requests. `tokenizer`: None takes the model's.

    Raises HardpointError.
    """
    scheduler = dataclasses.replace(config.scheduler, overlap=False)
    tokenizer = tokenizer or load_tokenizer(config.model)
    built = build_engine(dataclasses.replace(config, scheduler=scheduler))
    try:
        ledger = _instrument(built.engine)
        prompts = np.random.default_rng(config.model.seed)
        return [
            _crowd(built.engine, tokenizer, ledger, prompts.integers(0, built.info.vocab_size, (n, input_len)), steps)
            for n in crowds
        ]
    finally:
        built.engine.close()


def runner_of(engine: Any) -> Any:
    """The runner of an engine whose worker is in this process, for those who measure it from outside."""
    return engine._executor._worker.runner


def _instrument(engine: Engine) -> Ledger:
    """Wrap the parts of a built engine, which know nothing of it."""
    ledger = Ledger()
    loop: Any = engine
    runner = runner_of(engine)
    ledger.wrap(loop._scheduler, "schedule", "schedule")
    ledger.wrap(runner, "launch", "batch")
    for stage in runner._stages:
        for program in stage._programs.values():
            ledger.wrap(program, "run", "device")
    ledger.wrap(runner, "collect", "collect")
    ledger.wrap(engine, "_update", "update")
    ledger.wrap(engine, "step", "rest")
    return ledger


def _crowd(
    engine: Engine, tokenizer: TextTokenizer, ledger: Ledger, prompts: np.ndarray[Any, Any], steps: int
) -> StepParts:
    """Run one crowd and drop it afterwards."""
    wanted = _WARM_UP + steps
    params = SamplingParams(temperature=0.0, max_tokens=wanted + len(prompts) + 2, ignore_eos=True)
    texts = TokenTexts(tokenizer)
    processors: dict[str, OutputProcessor] = {}
    for number, prompt in enumerate(prompts):
        name = f"overhead-{len(prompts)}-{number}"
        processors[name] = OutputProcessor(tokenizer, prompt.tolist(), params, texts)
        engine.add(EngineRequest(request_id=name, prompt=prompt.tolist(), params=params))
    samples: list[tuple[dict[str, float], float]] = []
    speak = ledger.timed("text", _speak)
    while len(samples) < wanted:
        ledger.start_step()
        started = time.perf_counter()
        outputs = engine.step().outputs
        speak(processors, outputs)
        whole = time.perf_counter() - started
        if any(output.finish_reason is not None for output in outputs):
            raise EngineError(f"a request ended before {wanted} steps: {outputs[0].error or 'its length is reached'}")
        if len(outputs) == len(prompts) and all(len(output.token_ids) == 1 for output in outputs):
            samples.append((ledger.spent, whole))
    for name in processors:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return _medians(len(prompts), samples[_WARM_UP:])


def _speak(processors: Mapping[str, OutputProcessor], outputs: Sequence[Any]) -> None:
    for output in outputs:
        processors[output.request_id].process(0, output)


def _medians(requests: int, samples: Sequence[tuple[Mapping[str, float], float]]) -> StepParts:
    return StepParts(
        requests=requests,
        steps=len(samples),
        parts={part: 1e3 * statistics.median(spent[part] for spent, _ in samples) for part in PARTS},
        besides=1e3 * statistics.median(whole - spent["device"] for spent, whole in samples),
        whole=1e3 * statistics.median(whole for _, whole in samples),
    )
