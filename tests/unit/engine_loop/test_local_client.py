"""The streaming client over an engine on a thread: stop strings reach the engine, faults stay with their request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import null_engines
import pytest
from scripted_tokenizers import Scripted, byte_level

from hardpoint.config.engine import EngineConfig, ModelConfig
from hardpoint.errors import EngineDead, EngineError, RequestError
from hardpoint.frontend.local_client import LocalEngineClient
from hardpoint.request.output import SequenceDelta
from hardpoint.request.sampling import SamplingParams

CONFIG = EngineConfig(ModelConfig("nothing"))
TOKENIZER = byte_level()
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


@asynccontextmanager
async def running(
    tokenizer: Scripted = TOKENIZER, build: Callable[..., object] = null_engines.build
) -> AsyncIterator[LocalEngineClient]:
    client = LocalEngineClient(partial(build, CONFIG), tokenizer)  # type: ignore[arg-type]
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def collect(client: LocalEngineClient, name: str, params: SamplingParams) -> list[SequenceDelta]:
    return [delta async for delta in client.generate([65] * 4, params, request_id=name)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


def idle(client: LocalEngineClient) -> bool:
    return client.stats.running == client.stats.waiting == client.stats.pages_used == 0


def test_stop_string_ends_the_request_here_and_in_the_engine() -> None:
    async def main() -> None:
        async with running() as client:
            # the null executor counts up: tokens are letters in the order of the alphabet
            whole = "".join(d.text for d in await collect(client, "a", SamplingParams(max_tokens=40, ignore_eos=True)))
            stop = whole[20:23]
            deltas = await collect(client, "b", SamplingParams(max_tokens=2000, ignore_eos=True, stop=(stop,)))
            assert "".join(d.text for d in deltas) == whole[:20]
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
            await until(lambda: idle(client))

    asyncio.run(main())


def test_stop_string_frees_the_engine_though_nobody_reads() -> None:
    async def main() -> None:
        async with running() as client:
            stream = client.generate(
                [65] * 4, SamplingParams(max_tokens=2000, ignore_eos=True, stop=("u",)), request_id="r"
            )
            await anext(stream)
            await until(lambda: idle(client))
            rest = [delta async for delta in stream]
            assert rest[-1].finish_reason == "stop"

    asyncio.run(main())


def test_a_child_that_stops_leaves_its_siblings_running() -> None:
    async def main() -> None:
        async with running() as client:
            deltas = await collect(client, "r", SamplingParams(n=3, max_tokens=100, ignore_eos=True, stop=("~",)))
            ends = {d.index: d.finish_reason for d in deltas if d.finish_reason}
            assert set(ends) == {0, 1, 2}
            await until(lambda: idle(client))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("params", "how", "field"),
    [
        ({}, {"cache_salt": "\ud800"}, "cache_salt"),
        ({}, {"request_id": "r\udfff"}, "request_id"),
        ({}, {"priority": 1}, "priority"),
        ({"allowed_token_ids": TOKENIZER.eos_token_ids, "min_tokens": 2}, {}, "allowed_token_ids"),
        ({"stop_token_ids": tuple(range(null_engines.VOCAB)), "min_tokens": 2}, {}, "min_tokens"),
        ({"allowed_token_ids": TOKENIZER.encode("x"), "bad_words": ("x",)}, {}, "allowed_token_ids"),
    ],
    ids=str,
)
def test_refusals_leave_nothing_behind(params: dict[str, Any], how: dict[str, Any], field: str) -> None:
    async def main() -> None:
        async with running() as client:
            stream = client.generate([65], SamplingParams(max_tokens=3, **params), **({"request_id": "r"} | how))
            with pytest.raises(RequestError) as refusal:
                await anext(stream)
            assert (refusal.value.field, refusal.value.status) == (field, 400)
            assert not client._streams
            assert len(await collect(client, "r", SamplingParams(max_tokens=3, ignore_eos=True))) == 3

    asyncio.run(main())


def test_request_ids_are_unique_while_they_run() -> None:
    async def main() -> None:
        async with running() as client:
            first = asyncio.create_task(collect(client, "r", LONG))
            await until(lambda: client.stats.running == 1)
            with pytest.raises(RequestError):
                await collect(client, "r", LONG)
            await client.abort("r")
            await first
            assert (await collect(client, "r", SamplingParams(max_tokens=2, ignore_eos=True)))[
                -1
            ].finish_reason == "length"

    asyncio.run(main())


class Failing(Scripted):
    """Cannot decode the letter "k"."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = super().decode(ids, skip_special_tokens=skip_special_tokens)
        if "k" in text:
            raise ValueError("no k")
        return text


def test_text_that_cannot_be_made_fails_one_request() -> None:
    async def main() -> None:
        async with running(Failing(TOKENIZER.raw)) as client:
            quiet = asyncio.create_task(
                collect(client, "q", SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False))
            )
            with pytest.raises(EngineError, match="no k"):
                await collect(client, "r", LONG)
            assert (await quiet)[-1].finish_reason == "length"
            await until(lambda: idle(client))

    asyncio.run(main())


def test_engine_that_breaks() -> None:
    async def main() -> None:
        async with running(build=null_engines.build_losing) as client:
            assert (await collect(client, "r", LONG))[-1].finish_reason == "error"
            await until(lambda: client._dead is not None)
            with pytest.raises(EngineDead, match="fell off the bus"):
                await collect(client, "s", LONG)
            with pytest.raises(EngineDead, match="fell off the bus"):
                client.check_health()

    asyncio.run(main())


def test_32_streams_with_random_aborts_leave_nothing() -> None:
    async def one(client: LocalEngineClient, number: int) -> None:
        count = 0
        params = SamplingParams(n=1 + number % 3, max_tokens=60, ignore_eos=True)
        async for delta in client.generate(list(range(1, 20 + number)), params, request_id=f"r{number}"):
            count += len(delta.token_ids)
            if number % 4 == 0 and count > number:
                break
            if number % 4 == 1 and count > 10:
                await client.abort(f"r{number}")

    async def main() -> None:
        async with running(build=null_engines.build_fast) as client:
            await asyncio.gather(*(one(client, number) for number in range(32)))
            await until(lambda: idle(client))
            assert not client._streams
            assert not client._routes

    asyncio.run(main())
