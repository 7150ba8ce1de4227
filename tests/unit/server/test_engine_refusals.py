"""What only the client of a real engine refuses, over HTTP: 400 before anything runs, streamed or not."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest

from hardpoint.bench.null_engine import build_null_engine, word_tokenizer
from hardpoint.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.config.server import ServerConfig
from hardpoint.frontend.local_client import LocalEngineClient
from hardpoint.server.app import create_app

TEXT = "/v1/completions"
END = 2
TOKENIZER = word_tokenizer().with_eos(END)


def post(bodies: list[dict[str, Any]], policy: str = "fcfs") -> list[httpx.Response]:
    """Answers of a server over an engine that computes nothing."""
    config = EngineConfig(ModelConfig("nothing"), scheduler=SchedulerConfig(policy=policy))

    async def main() -> list[httpx.Response]:
        client = LocalEngineClient(partial(build_null_engine, config), TOKENIZER)  # type: ignore[arg-type]
        app = create_app(client, TOKENIZER, ServerConfig(), config.model)
        await client.start()
        try:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://test", timeout=20
            ) as http:
                return [await http.post(TEXT, json={"prompt": "x", "max_tokens": 4} | body) for body in bodies]
        finally:
            await client.close()

    return asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_fields(stream: bool) -> None:
    letter = TOKENIZER.encode("x", add_special_tokens=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"allowed_token_ids": [END], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": letter, "min_tokens": 1, "stop_token_ids": letter}, "allowed_token_ids"),
        ({"allowed_token_ids": letter, "bad_words": ["x"]}, "allowed_token_ids"),
        ({"stop_token_ids": list(range(16_384)), "min_tokens": 1}, "min_tokens"),
        ({"priority": 1}, "priority"),
        ({"priority": -1, "prompt": ["x", "y"]}, "priority"),
    ]
    for (_, field), answer in zip(cases, post([case | {"stream": stream} for case, _ in cases]), strict=True):
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
        assert field in answer.json()["error"]["message"]


def test_what_can_be_served_is() -> None:
    served = [{"allowed_token_ids": [END]}, {"allowed_token_ids": [END, 5], "min_tokens": 1}, {"priority": 0}, {}]
    assert [answer.status_code for answer in post(served)] == [200] * 4
    assert [answer.status_code for answer in post([{"priority": 7}, {"priority": -7}], "priority")] == [200] * 2


def test_a_timeout_ends_the_answer() -> None:
    (answer,) = post([{"timeout": 1e-9, "max_tokens": 8000}])
    assert answer.json()["choices"][0]["finish_reason"] == "timeout"
