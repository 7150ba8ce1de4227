"""`hardpoint bench throughput` and `hardpoint bench latency`: the engine in this process, no server between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hardpoint.bench.datasets import Prompt
from hardpoint.bench.report import Distribution, distribution
from hardpoint.request.output import RequestOutput
from hardpoint.request.sampling import SamplingParams


class Generator(Protocol):
    """The part of `LLM` that is measured."""

    def generate(self, prompts: Any, sampling_params: SamplingParams, *, use_tqdm: bool) -> list[RequestOutput]:
        """All prompts at once, to the end."""


@dataclass(frozen=True)
class Throughput:
    """One run of many requests at once, all there from the start."""

    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Tokens per second, prompts counted."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds


@dataclass(frozen=True)
class Latency:
    """One batch at a time: seconds of a whole batch, and of its first tokens."""

    batch: int
    output_len: int
    whole: Distribution
    first_token: Distribution

    @property
    def per_token(self) -> float:
        """Median seconds per step after the first token."""
        return (self.whole.median - self.first_token.median) / max(self.output_len - 1, 1)

    @property
    def decode_rate(self) -> float:
        """Output tokens per second of the batch after the first token; 0 where there is none."""
        return self.batch / self.per_token if self.per_token > 0 else 0.0


def fixed_length(tokens: int) -> SamplingParams:
    """Greedy, of exactly so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def as_inputs(prompts: Sequence[Prompt]) -> list[Any]:
    """Prompts as `LLM.generate` takes them."""
    return [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]


def throughput(llm: Generator, prompts: Sequence[Prompt], output_len: int) -> Throughput:
    """Generate for all prompts at once."""
    inputs = as_inputs(prompts)
    start = time.perf_counter()
    outputs = llm.generate(inputs, fixed_length(output_len), use_tqdm=False)
    seconds = time.perf_counter() - start
    return Throughput(
        requests=len(prompts),
        seconds=seconds,
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        output_tokens=sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs),
    )


def latency(llm: Generator, make_batch: Callable[[], Sequence[Prompt]], output_len: int, rounds: int) -> Latency:
    """Time `rounds` batches, each generated whole and once more for its first token alone.

    `make_batch` gives fresh prompts each time, so that no prefix is found in the cache.
    """
    whole: list[float] = []
    first: list[float] = []
    batch = 0
    for _ in range(rounds):
        for tokens, times in ((output_len, whole), (1, first)):
            inputs = as_inputs(make_batch())
            batch = len(inputs)
            start = time.perf_counter()
            llm.generate(inputs, fixed_length(tokens), use_tqdm=False)
            times.append(time.perf_counter() - start)
    whole_times, first_times = distribution(whole), distribution(first)
    if whole_times is None or first_times is None:
        raise ValueError("at least one round is needed")
    return Latency(batch, output_len, whole_times, first_times)
