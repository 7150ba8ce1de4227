"""A long greedy request beside every hostile one equals its solo run, and the engine serves on (all cases' check)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_driver import Answer, Driver, assert_same, engine_config

from hardpoint import SamplingParams
from hardpoint.engine.build import build_engine
from hardpoint.errors import RequestError
from hardpoint.frontend.local_client import LocalEngineClient
from hardpoint.frontend.tokenizer import load_tokenizer

pytestmark = pytest.mark.reference


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | changes))


ALL = tuple(range(300))
#: (prompt length, parameters, how it is submitted)
HOSTILE: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (500, {"max_tokens": 2**62}, {}),
    (511, {"max_tokens": None, "min_tokens": 2**62}, {}),
    (350, {"n": 40, "temperature": 1.0}, {}),
    (512, {"max_tokens": 0, "prompt_logprobs": 20}, {}),
    (200, {"prompt_logprobs": 20, "logprobs": 20, "n": 5}, {}),
    (30, {"n": 500, "max_tokens": 1}, {}),
    (30, {"stop": tuple(f"{number}" * 50 for number in range(90))}, {}),
    (30, {"stop": (" ", "w", "\ufffd", "\x00")}, {}),
    (30, {"stop_token_ids": ALL}, {}),
    (30, {"allowed_token_ids": ALL}, {}),
    (30, {"allowed_token_ids": (1,), "min_tokens": 12, "ignore_eos": False}, {}),
    (30, {"allowed_token_ids": (1,), "min_tokens": 12, "ignore_eos": False, "temperature": 1.0}, {}),
    (30, {"bad_words": tuple(f"w{number}" for number in range(128)), "temperature": 1.0}, {}),
    (30, {"bad_words": ("\ufffd" * 20, "é\u0301🦜", "x" * 1000)}, {}),
    (30, {"logit_bias": dict.fromkeys(ALL, 100.0), "temperature": 1.0}, {}),
    (30, {"logit_bias": dict.fromkeys(ALL, -100.0)}, {}),
    (300, {"repetition_penalty": 1e300, "presence_penalty": 2.0, "frequency_penalty": -2.0}, {}),
    (30, {"temperature": 1e300, "top_p": 1e-300, "top_k": 2**62, "min_p": 1.0, "seed": -(2**63)}, {}),
    (30, {"skip_special_tokens": False, "logit_bias": {0: 100.0}}, {}),
    (1, {"detokenize": False, "logprobs": 0}, {}),
    (30, {}, {"priority": -(2**62)}),
    (30, {}, {"deadline": 1e-9}),
    (30, {}, {"deadline": 1e300}),
    (30, {}, {"cache_salt": "\ud800" * 1000}),
    (30, {}, {"name": "#0#1##"}),
]


def test_neighbours_of_hostile_requests_are_not_changed(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    policy = "fcfs" if device == "reference" else "priority"
    driver: Driver = start(tiny, device=device, pages=80, budget=64, policy=policy)
    ordinary = (prompt_of(9), _params())
    neighbour = (prompt_of(25), _params(max_tokens=120))
    wanted, long = driver.ask_one(*ordinary), driver.ask_one(*neighbour)
    longs, ordinaries = driver.submit(*neighbour), []
    # what is hostile to the scheduler comes to the same on strict, whose every step is as large as its programs
    hostile = HOSTILE[:: 2 if device == "strict" else 1]
    for number, (length, changes, how) in enumerate(hostile):
        how = {"name": f"hostile{number}"} | how
        answers: list[Answer] = driver.submit(prompt_of(length, number), _params(**changes), **how)
        ordinaries += driver.submit(*ordinary)
        if longs[-1].finish_reason:
            longs += driver.submit(*neighbour)
        for _ in range(6):
            driver.step()
        if number % 3:  # a third of them go away in the middle
            driver.run(until=lambda answers=answers: all(a.finish_reason for a in answers))
            assert {a.finish_reason for a in answers} <= {"length", "stop", "timeout"}
        else:
            driver.abort(how["name"])
    driver.run()
    assert len(longs) > 1
    for answer in longs:
        assert_same(answer, long)
    for answer in ordinaries:
        assert_same(answer, wanted)
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def test_through_a_client(tiny: Any, start: Any, prompt_of: Any) -> None:
    """The same on the real loop: streams beside refusals, clients that go away, and aborts."""
    wanted = start(tiny, device="reference").ask_one(prompt_of(25), _params(max_tokens=120))

    async def stream(client: LocalEngineClient, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
        tokens: list[int] = []
        async for delta in client.generate(prompt, params, request_id=name):
            tokens += delta.token_ids
        return tokens

    async def leave(client: LocalEngineClient, name: str, after: int) -> None:
        generator = client.generate(prompt_of(40), _params(max_tokens=400, n=3), request_id=name)
        seen = 0
        async for _ in generator:
            seen += 1
            if seen > after:
                break
        await generator.aclose()  # type: ignore[attr-defined]

    async def main() -> None:
        config = engine_config(tiny, pages=100, budget=64)
        client = LocalEngineClient(lambda progress: build_engine(config, progress), load_tokenizer(config.model))
        await client.start()
        long = asyncio.create_task(stream(client, "long", prompt_of(25), _params(max_tokens=120)))
        leaving = [asyncio.create_task(leave(client, f"leave{number}", number)) for number in range(8)]
        for number in range(5):
            with pytest.raises(RequestError):
                await stream(client, f"bad{number}", prompt_of(512), _params())
        aborted = asyncio.create_task(stream(client, "aborted", prompt_of(30), _params(max_tokens=400)))
        await asyncio.sleep(0)
        await client.abort("aborted")
        assert len(await aborted) < 400
        await asyncio.gather(*leaving)
        assert await long == wanted.token_ids
        before = client.stats.generated_tokens
        stop = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True, stop=("w", " ", "1", "2", "3", "4"))
        assert len(await stream(client, "stopped", prompt_of(25), stop)) < 40
        again = await stream(client, "again", prompt_of(25), _params(max_tokens=120))
        assert again == wanted.token_ids
        for _ in range(200):
            if client.stats.running == client.stats.waiting == client.stats.pages_used == 0:
                break
            await asyncio.sleep(0.05)
        assert (client.stats.running, client.stats.waiting, client.stats.pages_used) == (0, 0, 0)
        # a stop string that the front end found has ended its request in the engine too
        assert client.stats.generated_tokens - before < 350
        client.check_health()
        await client.close()

    asyncio.run(main())
