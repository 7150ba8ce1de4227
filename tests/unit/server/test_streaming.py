"""A stream put together again is the whole answer, chunk by chunk in OpenAI's order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hardpoint.errors import EngineDead, EngineError, RequestError, TooManyRequests
from hardpoint.request.output import Logprob, SequenceDelta

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
BIRD = "🦜".encode()
BYTE = 3


def events(response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-1] == ""
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined_completion(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": None, "finish": [], "ids": []})
            choice["text"] += piece["text"]
            choice["ids"] += piece.get("token_ids") or []
            if piece["logprobs"] is not None:
                before = choice["logprobs"] or {}
                choice["logprobs"] = {k: before.get(k, []) + v for k, v in piece["logprobs"].items()}
            if piece["finish_reason"] is not None:
                choice["finish"].append((piece["finish_reason"], piece.get("stop_reason")))
    return choices


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize(("max_tokens", "n"), [(0, 1), (1, 1), (5, 1), (1, 3), (None, 3)])
@pytest.mark.parametrize("prompt", ["Tea is hot", ["a b", "c"], [5, 6], [[70, 71], [72]]])
def test_completion_stream_equals_whole(harness, echo, logprobs, max_tokens, n, prompt) -> None:
    if max_tokens == 0 and not echo:
        max_tokens = 2  # 0 is refused, see test_bad_input
    body = {"prompt": prompt, "echo": echo, "logprobs": logprobs, "max_tokens": max_tokens, "n": n}
    body |= {"return_token_ids": logprobs == 0}
    whole = harness.post(TEXT, body).json()
    chunks = events(harness.post(TEXT, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert [chunk["choices"] for chunk in chunks if chunk["usage"]] == [[]]
    assert chunks[-1]["usage"] == whole["usage"]
    streamed = joined_completion(chunks)
    prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
    assert [c["index"] for c in whole["choices"]] == list(range(prompts * n)) == sorted(streamed)
    for choice in whole["choices"]:
        stream = streamed[choice["index"]]
        assert stream["text"] == choice["text"]
        assert stream["logprobs"] == choice["logprobs"]
        assert stream["finish"] == [(choice["finish_reason"], choice["stop_reason"])] == [("length", None)]
        assert stream["ids"] == choice.get("token_ids", [])
        if logprobs is not None:
            check_arrays(choice)


def check_arrays(choice: dict[str, Any]) -> None:
    arrays = choice["logprobs"]
    assert {len(values) for values in arrays.values()} == {len(arrays["tokens"])}
    assert "".join(arrays["tokens"]) == choice["text"]
    at = 0
    for token, offset in zip(arrays["tokens"], arrays["text_offset"], strict=True):
        assert offset == at
        at += len(token)


def test_scoring_a_prompt(harness) -> None:
    body = {"prompt": "The kettle", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = harness.post(TEXT, body).json()
    choice = answer["choices"][0]
    assert choice["text"] == "The kettle"
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * 9
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][1] == {"h": -0.5, "A": -0.25}
    assert answer["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}
    }  # fmt: skip
    assert harness.client.calls[0]["params"].prompt_logprobs == 1


def test_echo_alone_needs_no_engine_but_counts(harness) -> None:
    answer = harness.post(TEXT, {"prompt": ["ab", "c"], "echo": True, "max_tokens": 0}).json()
    assert [c["text"] for c in answer["choices"]] == ["ab", "c"]
    assert harness.client.calls == []
    assert harness.lifecycle.in_flight == 0
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 3.0' in harness.get("/metrics").text


def test_echoed_tokens_are_found_in_the_text_as_written(harness) -> None:
    harness.tokenizer.adds_bos = True
    choice = harness.post(TEXT, {"prompt": "a🦜b", "echo": True, "logprobs": 0, "max_tokens": 1}).json()["choices"][0]
    arrays = choice["logprobs"]
    assert choice["text"] == "a🦜ba"
    parts = [f"bytes:\\x{byte:02x}" for byte in BIRD]
    assert arrays["tokens"] == ["", "a", *parts, "b", "a"]  # <s> has no part in the text
    assert arrays["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    ids = [1, BYTE + ord("x")]
    choice = harness.post(TEXT, {"prompt": ids, "echo": True, "max_tokens": 1, "skip_special_tokens": False}).json()
    assert choice["choices"][0]["text"] == "<s>xa"


def tokens_script(*steps: tuple[str, tuple[int, ...]], finish: str = "stop", stop_reason=None):
    def script(prompt, params):
        deltas = []
        for number, (text, tokens) in enumerate(steps):
            positions = tuple({t: Logprob(float("-inf"), 1, "")} for t in tokens)
            last = number == len(steps) - 1
            deltas.append(
                SequenceDelta(
                    0, text, tokens, positions if params.logprobs is not None else None,
                    finish if last else None, stop_reason if last else None,
                )
            )  # fmt: skip
        return deltas

    return script


def test_characters_in_pieces_and_a_silent_end(harness) -> None:
    bird = tuple(BYTE + byte for byte in BIRD)
    harness.client.script = tokens_script(("", bird[:2]), ("🦜", bird[2:]), ("", (2,)))
    choice = harness.post(TEXT, {"prompt": "x", "logprobs": 0}).json()["choices"][0]
    assert choice["text"] == "🦜"
    assert choice["logprobs"]["tokens"] == [f"bytes:\\x{b:02x}" for b in BIRD] + [""]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0, 1]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0] * 5
    assert choice["logprobs"]["top_logprobs"][-1] == {"</s>": -9999.0}
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1}
    entries = harness.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == BIRD
    assert entries[-1]["token"] == "</s>"
    chunks = events(harness.post(CHAT, {**body, "stream": True}))
    streamed = [e for c in chunks for e in ((c["choices"][0]["logprobs"] or {}).get("content") or [])]
    assert streamed == entries


def test_stop_string_in_the_first_token_with_logprobs(harness) -> None:
    harness.client.script = tokens_script(("", (BYTE + 10,)), stop_reason="\n")
    for stream in (False, True):
        response = harness.post(TEXT, {"prompt": "x", "logprobs": 5, "stop": ["\n"], "stream": stream})
        if stream:
            choice = joined_completion(events(response))[0]
            assert choice["finish"] == [("stop", "\n")]
        else:
            choice = response.json()["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "\n")
        assert choice["text"] == ""
        assert {len(v) for v in choice["logprobs"].values()} == {1}


def test_chat_stream_order_and_equality(harness) -> None:
    body = {"messages": USER, "n": 2, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    whole = harness.post(CHAT, body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(harness.post(CHAT, {**body, **options}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {(c["id"][:9], c["object"], c["model"]) for c in chunks} == {("chatcmpl-", "chat.completion.chunk", "tiny")}
    for choice in whole["choices"]:
        pieces = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert pieces[-1]["delta"] == {}
        assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert "".join(p["delta"].get("content", "") for p in pieces) == choice["message"]["content"]
        entries = [e for p in pieces for e in (p["logprobs"] or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [t["token"] for t in entries[0]["top_logprobs"]] == ["A", chr(97 + choice["index"])]
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_continuous_usage_counts_up(harness) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "hi"})):
        chunks = events(harness.post(path, {**body, **options, "max_tokens": 4}))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert chunks[0]["usage"]["prompt_tokens"] > 0


def test_no_usage_and_no_empty_chunks_unless_asked(harness) -> None:
    harness.client.script = tokens_script(("", (70,)), ("ab", (71,)), ("", (2,)))
    chunks = events(harness.post(CHAT, {"messages": USER, "stream": True}))
    assert ["usage" in chunk for chunk in chunks] == [False] * 3
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "ab", None]


def test_texts_are_escaped(harness) -> None:
    nasty = 'a"b\\c\n\n\u2028 data: [DONE]\n\n\x00'
    harness.client.script = tokens_script((nasty, (70,)), ("", (2,)))
    chunks = events(harness.post(CHAT, {"messages": USER, "stream": True}))
    assert chunks[1]["choices"][0]["delta"]["content"] == nasty
    assert joined_completion(events(harness.post(TEXT, {"prompt": "x", "stream": True})))[0]["text"] == nasty


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("too much", field="prompt"), 400, None),
        (TooManyRequests("full"), 503, "overloaded"),
        (EngineDead("gone"), 503, "engine_dead"),
        (EngineError("bad row"), 500, None),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_errors_before_and_within_an_answer(harness, path, error, status, code) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    harness.client.fail = error
    for stream in (False, True):  # nothing was sent yet: a plain HTTP error
        response = harness.post(path, {**body, "stream": stream})
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert "secret" not in response.text
    harness.client.fail_after = 2
    assert harness.post(path, body).status_code == status
    chunks = events(harness.post(path, {**body, "stream": True}))
    assert chunks[-1]["error"]["code"] == code
    assert "secret" not in str(chunks)
    assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])
    assert harness.lifecycle.in_flight == 0


def test_finish_reason_error_is_an_error(harness) -> None:
    harness.client.script = lambda prompt, params: [
        SequenceDelta(0, "a", (70,)),
        SequenceDelta(0, finish_reason="error", error="not finite"),
    ]
    assert harness.post(CHAT, {"messages": USER}).status_code == 500
    chunks = events(harness.post(CHAT, {"messages": USER, "stream": True}))
    assert chunks[-1]["error"]["message"] == "not finite"
