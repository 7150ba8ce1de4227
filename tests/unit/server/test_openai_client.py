"""The official client against the app, and the counters against the usage that it saw."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hardpoint.errors import EngineDead

USER = [{"role": "user", "content": "hi"}]


def client_of(harness, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=harness.http(), max_retries=0)


def counters(harness) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(harness.get("/metrics").text):
        for sample in family.samples:
            if sample.name.endswith("_total") and "vllm:" in sample.name:
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_chat_whole_and_streamed(harness) -> None:
    async def scenario() -> None:
        client = client_of(harness)
        arguments = {"model": "tiny", "messages": USER, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**arguments)
        assert whole.choices[0].message.content == "abcde"
        assert whole.choices[0].logprobs.content[0].top_logprobs[0].token == "A"
        stream = await client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
        text, usage, finish = "", None, []
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish += [choice.finish_reason] if choice.finish_reason else []
        assert (text, finish) == ("abcde", ["length"])
        assert usage == whole.usage

    asyncio.run(scenario())


def test_the_clients_own_accumulator(harness) -> None:
    plain = harness.client.script

    def stopping(prompt, params):
        return [replace(delta, finish_reason=delta.finish_reason and "stop") for delta in plain(prompt, params)]

    async def scenario() -> None:
        harness.client.script = stopping
        async with client_of(harness).chat.completions.stream(model="tiny", messages=USER, max_tokens=4, n=2) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["abcd", "bcde"]

    asyncio.run(scenario())


def test_completions_and_models(harness) -> None:
    async def scenario() -> None:
        client = client_of(harness)
        answer = await client.completions.create(
            model="tiny", prompt=["x", "y"], max_tokens=2, n=2, echo=True, logprobs=1
        )
        assert [choice.text for choice in answer.choices] == ["xab", "xbc", "yab", "ybc"]
        assert answer.choices[0].logprobs.token_logprobs[0] is None
        assert [model.id async for model in client.models.list()] == ["tiny", "small"]

    asyncio.run(scenario())


def test_the_client_raises_the_right_classes(make_harness) -> None:
    async def scenario() -> None:
        harness = make_harness(api_keys=("right",))
        client = client_of(harness, "right")
        with pytest.raises(openai.AuthenticationError):
            await client_of(harness, "wrong").models.list()
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=USER)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=USER, temperature=3)
        assert bad.value.param == "temperature"
        harness.client.fail = EngineDead("gone")
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="tiny", messages=USER)
        harness.client.fail_after = 2
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in await client.chat.completions.create(model="tiny", messages=USER, stream=True):
                pass

    asyncio.run(scenario())


def test_counters_equal_the_sums_of_usage(harness) -> None:
    usages = [
        harness.post("/v1/completions", {"prompt": ["ab", "c"], "n": 2, "max_tokens": 3}).json()["usage"],
        harness.post("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}).json()["usage"],
        harness.post("/v1/chat/completions", {"messages": USER, "max_tokens": 7}).json()["usage"],
    ]
    found = counters(harness)
    assert found["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert found["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert found["vllm:prompt_tokens_cached_total"] == cached
    assert found["vllm:request_success_total"] == 4 + 1 + 1


def test_routes_are_counted_by_their_template(harness) -> None:
    for number in range(5):
        harness.get(f"/v1/models/other-{number}")
        harness.get(f"/nothing/{number}")
    text = harness.get("/metrics").text
    assert 'http_requests_total{handler="/v1/models/{model_id:path}",method="GET",status="4xx"} 5.0' in text
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 5.0' in text
    assert "other-1" not in text
