"""`hardpoint bench serve`: a running server under load, over HTTP, streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hardpoint.bench.datasets import PromptSettings, prompts
from hardpoint.bench.load import LoadError, LoadGenerator, Record, Target, fetch_json


@dataclass(frozen=True)
class ServingSettings:
    """One run against a server.

    Attributes:
        target: the server.
        model: a name it serves; None asks the server.
        requests: how many are counted; warmup: how many go before them, not counted.
        concurrency: requests under way at once (closed loop); not used with a rate.
        rate: requests per second (open loop), or None.
        output_len: tokens generated per request, end-of-sequence ignored.
        prompts: what is sent.
        temperature: 0 is greedy.
        timeout: seconds until a request counts as failed.
    """

    target: Target
    model: str | None = None
    requests: int = 32
    warmup: int = 1
    concurrency: int = 16
    rate: float | None = None
    output_len: int = 64
    prompts: PromptSettings = field(default_factory=PromptSettings)
    temperature: float = 0.0
    timeout: float = 600.0


def run(settings: ServingSettings, on_done: Callable[[], None] | None = None) -> list[Record]:
    """Warm up, send all requests, and return their records. Raises LoadError where nothing can be measured."""
    return asyncio.run(_run(settings, on_done))


async def _run(settings: ServingSettings, on_done: Callable[[], None] | None) -> list[Record]:
    model = settings.model or await served_model(settings.target)
    texts = prompts(settings.prompts, settings.warmup + settings.requests)
    bodies = [request_body(model, text, settings) for text in texts]
    generator = LoadGenerator(settings.target, timeout=settings.timeout)
    if settings.warmup:
        warm = await generator.closed_loop(bodies[: settings.warmup], settings.concurrency)
        broken = [record.error for record in warm if record.error]
        if broken:
            raise LoadError(f"the first request to {settings.target.url} failed: {broken[0]}")
    counted = bodies[settings.warmup :]
    if settings.rate is not None:
        return await generator.open_loop(counted, settings.rate, settings.prompts.seed, on_done)
    return await generator.closed_loop(counted, settings.concurrency, on_done)


def request_body(model: str, prompt: Any, settings: ServingSettings) -> dict[str, Any]:
    """A streamed completion of exactly `output_len` tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": settings.output_len,
        "min_tokens": settings.output_len,
        "ignore_eos": True,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def served_model(target: Target) -> str:
    """The first model of /v1/models. Raises LoadError."""
    answer = await fetch_json(target, "/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise LoadError(f"{target.url}/v1/models names no model", hint="name one with --model") from error
