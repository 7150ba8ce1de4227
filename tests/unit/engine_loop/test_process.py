"""The engine in a process of its own, with an executor that computes nothing (cases S-20, S-21)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hardpoint.config.engine import EngineConfig, ModelConfig
from hardpoint.engine.launch import launch_engine
from hardpoint.errors import ConfigError, EngineBusy, EngineDead, EngineError, PromptTooLong
from hardpoint.frontend.remote_client import RemoteEngineClient
from hardpoint.request.output import SequenceDelta
from hardpoint.request.sampling import SamplingParams
from hardpoint_platforms.errors import HardpointError

CONFIG = EngineConfig(ModelConfig("nothing"))
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


@asynccontextmanager
async def running(builder: str = "build", **more: object) -> AsyncIterator[RemoteEngineClient]:
    client = RemoteEngineClient(CONFIG, builder=f"null_engines:{builder}", **more)  # type: ignore[arg-type]
    try:
        await client.start()
        yield client
    finally:
        await client.close()
        assert not psutil.pid_exists(client.pid)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.02)


async def collect(
    client: RemoteEngineClient, name: str, params: SamplingParams, length: int = 4
) -> list[SequenceDelta]:
    return [delta async for delta in client.generate([1] * length, params, request_id=name)]


def unhealthy(client: RemoteEngineClient) -> bool:
    try:
        client.check_health()
    except EngineDead:
        return True
    return False


def test_streams_and_leaves_nothing_behind() -> None:
    phases: list[str] = []

    async def main() -> None:
        client = RemoteEngineClient(
            CONFIG, builder="null_engines:build", on_progress=lambda phase, done: phases.append(phase)
        )
        folder = Path(client._process.channel.addresses.pair.removeprefix("ipc://")).parent
        with pytest.raises(EngineBusy):
            client.check_health()
        await client.start()
        await client.start()
        client.check_health()
        assert client.info.device == "null:0"
        results = await asyncio.gather(*(collect(client, f"r{i}", SHORT) for i in range(12)))
        assert [sum(len(d.token_ids) for d in deltas) for deltas in results] == [8] * 12
        assert all(deltas[-1].finish_reason == "length" for deltas in results)
        many = await collect(client, "n", SamplingParams(n=3, max_tokens=5, ignore_eos=True))
        assert sorted(d.index for d in many if d.finish_reason) == [0, 1, 2]
        await until(lambda: not folder.exists())
        await client.close()
        await client.close()
        assert client.exit_code == 0
        with pytest.raises(EngineDead):
            await collect(client, "late", SHORT)

    asyncio.run(main())
    assert "load weights" in phases


def test_abort_and_a_reader_that_goes_away_free_everything() -> None:
    async def main() -> None:
        async with running() as client:
            whole = asyncio.create_task(collect(client, "whole", LONG))
            gone = asyncio.create_task(collect(client, "gone", SamplingParams(n=4, max_tokens=4000, ignore_eos=True)))
            await until(lambda: client.stats.running == 5)
            await client.abort("whole")
            await client.abort("unknown")
            assert (await whole)[-1].finish_reason == "abort"
            gone.cancel()
            async for delta in client.generate([1, 2], LONG, request_id="left"):
                if delta.token_ids:
                    break
            await until(lambda: client.stats.running == client.stats.waiting == client.stats.pages_used == 0)
            assert len(await collect(client, "after", SHORT)) == 8

    asyncio.run(main())


def test_refusals_are_raised_and_hurt_nobody() -> None:
    async def main() -> None:
        async with running() as client:
            neighbour = asyncio.create_task(collect(client, "n", SHORT))
            with pytest.raises(PromptTooLong) as refusal:
                await collect(client, "r", SamplingParams(n=2), length=5000)
            assert refusal.value.field == "prompt"
            assert len(await neighbour) == 8

    asyncio.run(main())


@pytest.mark.parametrize("during_a_stream", [False, True])
def test_killed_engine_is_seen_at_once(during_a_stream: bool) -> None:
    async def main() -> None:
        async with running() as client:
            streams = [asyncio.create_task(collect(client, f"r{i}", LONG)) for i in range(3 * during_a_stream)]
            await until(lambda: client.stats.running == len(streams))
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: unhealthy(client))
            async with asyncio.timeout(15):
                for error in await asyncio.gather(*streams, return_exceptions=True):
                    assert isinstance(error, EngineDead)
                    assert "SIGKILL" in error.message
                with pytest.raises(EngineDead):
                    await collect(client, "new", SHORT)
            assert client.exit_code == -signal.SIGKILL

    asyncio.run(main())


def test_stopped_engine_is_unhealthy_until_it_goes_on() -> None:
    async def main() -> None:
        async with running(health_timeout=1.5) as client:
            stream = asyncio.create_task(collect(client, "r", SamplingParams(max_tokens=1000, ignore_eos=True)))
            await until(lambda: client.stats.running == 1)
            os.kill(client.pid, signal.SIGSTOP)
            await until(lambda: unhealthy(client))
            assert not stream.done()
            os.kill(client.pid, signal.SIGCONT)
            await until(lambda: not unhealthy(client))
            assert sum(len(d.token_ids) for d in await stream) == 1000

    asyncio.run(main())


def test_stopped_engine_is_killed_on_close() -> None:
    async def main() -> None:
        async with running() as client:
            client._process.end = lambda timeout, end=client._process.end: end(0.2)  # type: ignore[method-assign]
            os.kill(client.pid, signal.SIGSTOP)
            stream = asyncio.create_task(collect(client, "r", LONG))
            await asyncio.sleep(0)
        assert (await stream)[-1].finish_reason == "abort"

    asyncio.run(main())


def test_lost_device_ends_requests_with_an_error_and_the_process() -> None:
    async def main() -> None:
        async with running("build_losing") as client:
            deltas = await collect(client, "r", LONG)
            assert deltas[-1].finish_reason == "error"
            assert "fell off the bus" in (deltas[-1].error or "")
            await until(lambda: unhealthy(client))
            await until(lambda: client.exit_code == 1)
            with pytest.raises(EngineDead, match="fell off the bus"):
                client.check_health()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("builder", "error", "message", "hint", "traceback"),
    [
        ("build_refused", ConfigError, "nothing cannot be served here", "try another", False),
        ("build_broken", EngineError, "KeyError", "bug", True),
        ("build_dying", EngineDead, "exit code 3", "messages", False),
        ("no_such_function", EngineError, "no_such_function", "bug", True),
    ],
)
def test_start_up_failures(
    builder: str,
    error: type[EngineError],
    message: str,
    hint: str,
    traceback: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def main() -> None:
        client = RemoteEngineClient(CONFIG, builder=f"null_engines:{builder}")
        with pytest.raises(error) as failure:
            await client.start()
        assert message in failure.value.message
        assert hint in (failure.value.hint or "")
        with pytest.raises(EngineDead):
            client.check_health()
        await client.close()
        assert client.exit_code in (1, 3)

    asyncio.run(main())
    out, err = capfd.readouterr()
    assert out == ""
    assert ("Traceback" in err) == traceback


def test_close_before_it_is_ready() -> None:
    async def main() -> None:
        client = RemoteEngineClient(CONFIG, builder="null_engines:build")
        await client.close()
        assert client.exit_code is not None

    asyncio.run(main())


def test_a_process_that_was_launched_before_serves() -> None:
    async def main() -> None:
        launched = launch_engine()
        async with running(launched=launched) as client:
            assert client.pid == launched.process.pid
            assert len((await collect(client, "a", SHORT))[-1].token_ids) > 0

    asyncio.run(main())


def test_a_launched_process_ends_when_it_is_not_wanted() -> None:
    cancelled, left = launch_engine(), launch_engine()
    cancelled.cancel()
    assert cancelled.process.returncode == -signal.SIGKILL
    assert left.process.stdin is not None
    left.process.stdin.close()  # as when the front end ends before it has configured it
    assert left.process.wait(15) == 1


PARENT = """
import asyncio, sys
sys.path.append({folder!r})
from hardpoint.config.engine import EngineConfig, ModelConfig
from hardpoint.frontend.remote_client import RemoteEngineClient
client = RemoteEngineClient(EngineConfig(ModelConfig("x")), builder="null_engines:build")
async def main():
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep({seconds})
asyncio.run(main())
"""


@pytest.mark.parametrize(("end", "seconds"), [("kill", 60), ("leave", 0)])
def test_engine_dies_with_its_parent(end: str, seconds: int) -> None:
    """Killed, or gone without close (and without a main guard)."""
    code = PARENT.format(folder=str(Path(__file__).parent), seconds=seconds)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        if end == "kill":
            parent.kill()
        engine.wait(10)


def test_signals_to_the_engine_are_the_front_ends_business() -> None:
    async def main() -> None:
        async with running() as client:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(client.pid, number)
            assert len(await collect(client, "r", SHORT)) == 8
            client.check_health()

    asyncio.run(main())


def test_idle_engine_sleeps() -> None:
    async def main() -> None:
        async with running() as client:
            await collect(client, "r", SHORT)
            process = psutil.Process(client.pid)
            switches, started = process.num_ctx_switches().voluntary, asyncio.get_running_loop().time()
            await asyncio.sleep(2.0)
            seconds = asyncio.get_running_loop().time() - started
            # per thread of the process only the heartbeat wakes, once a second
            assert process.num_ctx_switches().voluntary - switches < 50 * seconds

    asyncio.run(main())


@pytest.mark.parametrize(
    ("builder", "told", "on_stderr"),
    [
        (
            "build_hanging",
            "the engine hangs: it does not come back: no progress for 0.5 s in phase 'a long phase' of starting, at ",
            "ERROR engine __main__: the engine stops: the engine hangs",
        ),
        ("build_blocked", "see the engine's messages above", "in build_blocked"),
    ],
)
def test_a_start_that_hangs_ends(builder: str, told: str, on_stderr: str, capfd: pytest.CaptureFixture[str]) -> None:
    config = replace(CONFIG, device=replace(CONFIG.device, startup_timeout=0.5))

    async def main() -> tuple[str, int | None]:
        client = RemoteEngineClient(config, builder=f"null_engines:{builder}")
        try:
            with pytest.raises(HardpointError) as caught:
                async with asyncio.timeout(60):
                    await client.start()
        finally:
            await client.close()
        return str(caught.value), client.exit_code

    said, code = asyncio.run(main())
    assert code == 1
    assert told in said
    assert on_stderr in capfd.readouterr().err


def test_a_step_that_hangs_ends_the_engine() -> None:
    """Its requests end with what happened; the process does not wait for the step."""
    config = replace(CONFIG, device=replace(CONFIG.device, step_timeout=0.7))

    async def main() -> tuple[str, int | None]:
        client = RemoteEngineClient(config, builder="null_engines:build_slow")
        try:
            async with asyncio.timeout(60):
                await client.start()
                await asyncio.sleep(1.5)  # idle for longer than a step may take
                client.check_health()
                with pytest.raises(EngineDead) as caught:
                    await collect(client, "r", SHORT)
        finally:
            await client.close()
        return str(caught.value), client.exit_code

    said, code = asyncio.run(main())
    assert code == 1
    assert "the engine hangs: a step takes" in said
    assert "--step-timeout" in said
