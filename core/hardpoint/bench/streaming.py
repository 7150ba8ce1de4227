"""`hardpoint bench stream`: what the front end and the engine process cost per streamed token.

    load generator (this process) --HTTP--> front end process --ZeroMQ--> engine process, which computes nothing

The number is output tokens per second of processor time that front end and engine used together, so it does not depend
on how many cores there are nor on what the load generator takes.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil

from hardpoint.bench.datasets import PromptSettings, prompts
from hardpoint.bench.load import LoadError, LoadGenerator, Target, fetch_json
from hardpoint.bench.null_engine import VOCAB_SIZE
from hardpoint.bench.report import Summary, summarize
from hardpoint.bench.serving import ServingSettings, request_body

#: Tokens per second of one core that the front end and engine are to carry.
GOAL = 2_000.0
_START_TIMEOUT = 60.0


@dataclass(frozen=True)
class StreamingResult:
    """One run.

    Attributes:
        summary: as the clients saw it.
        pieces: events of all streams; tokens that are ready at the same time share one.
        front_end_seconds, engine_seconds: processor time that each process used.
    """

    summary: Summary
    pieces: int
    front_end_seconds: float
    engine_seconds: float

    @property
    def tokens_per_core_second(self) -> float:
        """Streamed tokens per second of processor time of both processes."""
        return self.summary.output_tokens / (self.front_end_seconds + self.engine_seconds)

    @property
    def goal_met(self) -> bool:
        """Whether that is at least GOAL."""
        return self.tokens_per_core_second >= GOAL


def run(
    requests: int, concurrency: int, input_len: int, output_len: int, tokenizer: str | None = None
) -> StreamingResult:
    """Start both processes, stream, and stop them. `tokenizer`: a model whose tokenizer is used.

    Raises LoadError if the front end does not come up or a request fails.
    """
    port = _free_port()
    command = [sys.executable, "-m", "hardpoint.bench.front_end", str(port), *([tokenizer] if tokenizer else [])]
    front_end = subprocess.Popen(command)
    try:
        target = Target("127.0.0.1", port)
        settings = ServingSettings(
            target,
            model="null",
            output_len=output_len,
            prompts=PromptSettings(input_len=input_len, vocab_size=VOCAB_SIZE),
        )
        bodies = [request_body("null", text, settings) for text in prompts(settings.prompts, requests)]
        return asyncio.run(_measure(front_end, target, bodies, concurrency))
    finally:
        front_end.terminate()
        try:
            front_end.wait(10)
        except subprocess.TimeoutExpired:
            front_end.kill()


async def _measure(
    front_end: subprocess.Popen[bytes], target: Target, bodies: list[dict[str, object]], concurrency: int
) -> StreamingResult:
    await _wait_until_ready(front_end, target)
    generator = LoadGenerator(target)
    warm = await generator.closed_loop(bodies[:concurrency], concurrency)
    process = psutil.Process(front_end.pid)
    engines = process.children(recursive=True)
    before = (_cpu([process]), _cpu(engines))
    records = await generator.closed_loop(bodies, concurrency)
    after = (_cpu([process]), _cpu(engines))
    failed = [record.error for record in [*warm, *records] if record.error]
    if failed:
        raise LoadError(f"{len(failed)} requests failed; the first: {failed[0]}")
    pieces = sum(len(record.events) for record in records)
    return StreamingResult(summarize(records), pieces, after[0] - before[0], after[1] - before[1])


async def _wait_until_ready(front_end: subprocess.Popen[bytes], target: Target) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while True:
        if front_end.poll() is not None:
            raise LoadError(f"the front end ended at its start (exit code {front_end.returncode})")
        try:
            await fetch_json(target, "/v1/models")
            return
        except LoadError as error:
            if time.monotonic() > deadline:
                raise LoadError(f"the front end was not ready after {_START_TIMEOUT:.0f} s: {error.message}") from error
            await asyncio.sleep(0.1)


def _cpu(processes: list[psutil.Process]) -> float:
    """Seconds of processor time, user and system."""
    times = [process.cpu_times() for process in processes]
    return sum(entry.user + entry.system for entry in times)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
