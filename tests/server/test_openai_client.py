"""The official `openai` client against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.server

USER = [{"role": "user", "content": "tell me"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}
PROMPT = [20 + 3 * i for i in range(40)]


def joined(stream: Any) -> tuple[dict[int, str], dict[int, list[str]], Any]:
    """Texts and finish reasons by choice, and the usage that the last chunk brought."""
    texts: dict[int, str] = {}
    finishes: dict[int, list[str]] = {}
    usages = []
    for chunk in stream:
        assert not usages, "a chunk after the usage"
        if chunk.usage is not None:
            assert chunk.choices == []
            usages.append(chunk.usage)
        for choice in chunk.choices:
            part = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (part or "")
            finishes.setdefault(choice.index, [])
            if choice.finish_reason is not None:
                finishes[choice.index].append(choice.finish_reason)
    return texts, finishes, usages[0] if usages else None


def test_chat_whole_and_streamed(server: ServerProcess) -> None:
    chat = server.client.chat.completions
    whole = chat.create(messages=USER, **GREEDY)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    stream = chat.create(messages=USER, stream=True, stream_options={"include_usage": True}, **GREEDY)
    texts, finishes, usage = joined(stream)
    assert texts == {0: whole.choices[0].message.content}
    assert finishes == {0: ["length"]}
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 24)
    assert joined(chat.create(messages=USER, stream=True, **GREEDY)) == (texts, finishes, None)


def test_the_clients_accumulator(server: ServerProcess) -> None:
    """It insists on roles, indices and types that fit together, and raises where an answer was cut by max_tokens."""
    chat = server.client.chat.completions
    whole = chat.create(messages=USER, **GREEDY)
    last = whole.choices[0].message.content[-1:]
    arguments = {**GREEDY, "messages": USER, "n": 2, "stop": [last]}
    stopped = chat.create(**arguments)
    with chat.stream(**arguments) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [c.message.content for c in final.choices] == [c.message.content for c in stopped.choices]
    assert {choice.finish_reason for choice in final.choices} == {"stop"}


@pytest.mark.parametrize("n", [1, 3])
def test_completions_whole_and_streamed(server: ServerProcess, n: int) -> None:
    arguments = {"model": "tiny", "prompt": [PROMPT, [9, 8, 7]], "max_tokens": 30, "n": n, "seed": 5}
    whole = server.client.completions.create(**arguments)
    assert [choice.index for choice in whole.choices] == list(range(2 * n))
    stream = server.client.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    texts, finishes, usage = joined(stream)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert finishes == {choice.index: [choice.finish_reason] for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == 43


def test_forms_of_a_prompt(server: ServerProcess) -> None:
    """A text, its ids, and lists of either are one and the same."""
    tokens = server.http.post("/tokenize", json={"prompt": "two words"}).json()["tokens"]
    ask = server.client.completions.create
    expected = ask(prompt="two words", **GREEDY).choices[0].text
    other = ask(prompt=PROMPT, **GREEDY).choices[0].text
    assert expected != other
    assert ask(prompt=tokens, **GREEDY).choices[0].text == expected
    assert [c.text for c in ask(prompt=["two words", "two words"], **GREEDY).choices] == [expected, expected]
    assert [c.text for c in ask(prompt=[PROMPT, tokens, PROMPT], **GREEDY).choices] == [other, expected, other]


def test_stop_strings(server: ServerProcess) -> None:
    """Every cut of the text is found, wherever it lies in the tokens, and shown only where asked."""
    ask = server.client.completions.create
    text = ask(prompt=PROMPT, **GREEDY).choices[0].text
    for begin, end in ((0, 1), (3, 6), (len(text) // 2, len(text) // 2 + 2)):
        stop = text[begin:end]
        first = text.find(stop)
        shown = ask(prompt=PROMPT, stop=stop, **GREEDY).choices[0]
        assert (shown.text, shown.finish_reason) == (text[:first], "stop")
        texts, finishes, _ = joined(ask(prompt=PROMPT, stop=[stop, "absent"], stream=True, **GREEDY))
        assert (texts, finishes) == ({0: text[:first]}, {0: ["stop"]})
        kept = ask(prompt=PROMPT, stop=[stop], extra_body={"include_stop_str_in_output": True}, **GREEDY)
        assert kept.choices[0].text == text[: first + len(stop)]


def test_logprobs(server: ServerProcess) -> None:
    whole = server.client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY).choices[0].logprobs
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == len(whole.text_offset) == 24
    for own, candidates in zip(whole.token_logprobs, whole.top_logprobs, strict=True):
        assert own == max(candidates.values()) <= 0
        assert len(candidates) in (2, 3)  # two tokens may have the same spelling
    chat = {**GREEDY, "messages": USER, "logprobs": True, "top_logprobs": 4}
    content = server.client.chat.completions.create(**chat).choices[0].logprobs.content
    assert len(content) == 24
    assert all(len(entry.top_logprobs) == 4 and entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    streamed = [
        entry
        for chunk in server.client.chat.completions.create(stream=True, **chat)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    for one, other in zip(streamed, content, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_the_prefix_cache_shows_in_usage(server: ServerProcess) -> None:
    assert server.http.post("/reset_prefix_cache").status_code == 200
    prompt = [30 + i % 200 for i in range(100)]
    cold = server.client.completions.create(prompt=prompt, **GREEDY)
    warm = server.client.completions.create(prompt=prompt, **GREEDY)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == 96
    assert warm.choices[0].text == cold.choices[0].text
    stream = server.client.completions.create(
        prompt=prompt, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    assert joined(stream)[2].prompt_tokens_details.cached_tokens == 96
    salted = server.client.completions.create(prompt=prompt, extra_body={"cache_salt": "other"}, **GREEDY)
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert server.http.post("/reset_prefix_cache").status_code == 200
    again = server.client.completions.create(prompt=prompt, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == 0


def test_models_and_unknown_models(server: ServerProcess) -> None:
    (card,) = server.client.models.list().data
    assert (card.id, card.object) == ("tiny", "model")
    assert server.client.models.retrieve("tiny").id == "tiny"
    asks = (
        lambda: server.client.models.retrieve("gpt-x"),
        lambda: server.client.completions.create(model="gpt-x", prompt="a"),
        lambda: server.client.chat.completions.create(model="gpt-x", messages=USER),
        lambda: list(server.client.chat.completions.create(model="gpt-x", messages=USER, stream=True)),
    )
    for ask in asks:
        with pytest.raises(openai.NotFoundError) as refused:
            ask()
        assert refused.value.code == "model_not_found"
        assert "gpt-x" in refused.value.message


def test_a_prompt_longer_than_the_context(server: ServerProcess) -> None:
    for extra, wanted in (({}, 4097), ({"max_tokens": 100}, 4050), ({"stream": True}, 4096)):
        arguments = {"model": "tiny", "prompt": [7] * wanted} | extra
        with pytest.raises(openai.BadRequestError) as refused:
            server.client.completions.create(**arguments)
        error = refused.value
        assert error.code == "context_length_exceeded"
        assert str(wanted) in error.message
        assert "4096" in error.message
    with pytest.raises(openai.BadRequestError, match="characters") as refused:
        server.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 3_000_000}])
    assert refused.value.param == "messages"


def test_one_field_at_fault_is_named(server: ServerProcess) -> None:
    chat, text = server.client.chat.completions.create, server.client.completions.create
    for ask, field, value in (
        (chat, "temperature", -0.5),
        (chat, "top_p", 1.5),
        (chat, "n", 0),
        (chat, "max_completion_tokens", -3),
        (chat, "top_logprobs", 21),
        (chat, "presence_penalty", 9),
        (text, "max_tokens", -1),
        (text, "logprobs", 99),
        (text, "best_of", 7),
        (text, "seed", 2**63),
        (text, "logit_bias", {"301": 1}),
    ):
        arguments: dict[str, Any] = {"model": "tiny", field: value}
        arguments |= {"messages": USER, "logprobs": True} if ask is chat else {"prompt": "a"}
        arguments[field] = value
        with pytest.raises(openai.BadRequestError) as refused:
            ask(**arguments)
        assert refused.value.param == field
        assert field in refused.value.message


def test_request_ids_and_version(server: ServerProcess) -> None:
    raw = server.client.chat.completions.with_raw_response.create(
        messages=USER, extra_headers={"X-Request-Id": "mine-7"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().id == "chatcmpl-mine-7"
    import hardpoint

    assert server.http.get("/version").json() == {"version": hardpoint.__version__}


def test_tokenize_and_back(server: ServerProcess) -> None:
    for text in ("plain", "a\u0000b", "日本語 🦜 é", "</s><s>", " w3", "x" * 3000):
        tokens = server.http.post("/tokenize", json={"prompt": text}).json()
        assert tokens["count"] == len(tokens["tokens"])
        assert tokens["max_model_len"] == 4096
        back = server.http.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert back.json() == {"prompt": text}
    assert server.http.post("/tokenize", json={"prompt": "</s>"}).json()["tokens"] == [1]
    assert server.http.post("/detokenize", json={"tokens": [300]}).status_code == 400


def test_many_clients_get_what_one_gets(server: ServerProcess) -> None:
    """48 at a time, of both kinds: each answer is the one that it gets alone."""
    prompts = [[50 + i, *PROMPT[: 5 + i % 30]] for i in range(12)]
    alone = [server.client.completions.create(prompt=prompt, **GREEDY).choices[0].text for prompt in prompts]

    async def scenario() -> list[str]:
        async with server.async_client() as client:

            async def ask(number: int) -> str:
                arguments = {**GREEDY, "prompt": prompts[number % 12]}
                if number % 2:
                    return (await client.completions.create(**arguments)).choices[0].text
                stream = await client.completions.create(stream=True, **arguments)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(ask(number) for number in range(48)))

    assert asyncio.run(scenario()) == alone * 4
