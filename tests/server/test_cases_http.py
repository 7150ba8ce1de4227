"""Cases of public bug reports about parameters and streams, over HTTP: S-03, S-05, S-07, S-33, S-34."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_process import ServerProcess, assert_close, events, neighbour
from tiny_models import EOS, byte_id

pytestmark = pytest.mark.server

A, NEWLINE = byte_id(ord("a")), byte_id(10)
USER = [{"role": "user", "content": "hi"}]


def strict_json(text: str) -> Any:
    """JSON without NaN and the like."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def ids_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


@pytest.mark.parametrize(("prompt", "min_tokens", "at"), [(2, 4, 4), (60, 4, 4), (5, 0, 0), (5, 1, 1), (60, 17, 17)])
def test_min_tokens_counts_output_tokens(server: ServerProcess, prompt: int, min_tokens: int, at: int) -> None:
    """S-03: EOS is wanted from the start, and comes exactly when it may."""
    answer = server.complete([7] * prompt, min_tokens=min_tokens, logit_bias={str(EOS): 100}, max_tokens=30)
    (ids,) = ids_of(answer)
    assert ids.index(EOS) == at == len(ids) - 1
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == at + 1


def test_min_tokens_and_stop_strings(server: ServerProcess) -> None:
    """S-03: stop strings are looked for once there are enough tokens."""
    answer = server.complete([7], min_tokens=4, stop=["a"], logit_bias={str(A): 100}, max_tokens=30)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] in (4, 5)
    assert answer["choices"][0]["text"] == "a" * (answer["usage"]["completion_tokens"] - 1)
    refused = server.http.post("/v1/completions", json={"prompt": "x", "min_tokens": 9, "max_tokens": 5})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "min_tokens"


def test_seed_with_n(server: ServerProcess) -> None:
    """S-05: choice i is the same in every repeat, also in a crowd."""
    body = {"prompt": [5, 6, 7], "temperature": 1, "n": 3, "max_tokens": 24, "return_token_ids": True}
    seeded = {**body, "seed": 1234}

    def ask(**fields: Any) -> list[list[int]]:
        return ids_of(server.complete(**{**body, **fields}))

    first = ask(seed=1234)
    assert len({tuple(ids) for ids in first}) == 3
    assert ask(seed=1234) == first
    others = [ask(seed=seed) for seed in (1235, 0, 2**63 - 1, -(2**63))]
    assert len({str(answer) for answer in [first, *others]}) == 5
    assert ask(seed=0) == others[1]
    assert ask() != ask()
    assert ask(seed=-1) != ask(seed=-1)  # -1 is "not given"

    async def crowd() -> list[dict[str, Any]]:
        async with server.async_http() as http:
            bodies = [seeded, body] * 8
            return [r.json() for r in await asyncio.gather(*(http.post("/v1/completions", json=b) for b in bodies))]

    answers = [ids_of(answer) for answer in asyncio.run(crowd())]
    assert answers[::2] == [first] * 8
    assert len({str(answer) for answer in answers[1::2]}) == 8
    many = server.complete([5], n=64, max_tokens=1, temperature=1)
    assert [choice["index"] for choice in many["choices"]] == list(range(64))
    assert server.http.post("/v1/completions", json={"prompt": "a", "seed": 2**63}).status_code == 400


HOSTILE = [
    ("temperature", ["NaN", "Infinity", "-Infinity", "-0.1", '"0.7"', "true", "1e999", "2.1", "[]", "{}"]),
    ("top_p", ["0", "1.5", "NaN", "-1", '"1"', "false"]),
    ("min_p", ["NaN", "-0.1", "1.1"]),
    ("presence_penalty", ["1e308", "NaN", "-2.1"]),
    ("frequency_penalty", ["Infinity", "2.1", '"x"']),
    ("repetition_penalty", ["0", "-1", "NaN", "1e999"]),
    ("top_k", ["-2", "1.5", "NaN", '"5"', "1e30"]),
    ("max_tokens", ["-1", "1.5", "1e400", "99999999999999999999999", '"7"', "true"]),
    ("n", ["0", "-1", "129", "1000000", "2.5", "null, "]),
    ("stop", ["[1]", '[""]', '""', "[null]", '{"a": 1}', json.dumps(["a"] * 17)]),
    ("stop_token_ids", ["[300]", "[-1]", "[1.5]", "5"]),
    ("logit_bias", ['{"x": 1}', '{"5": NaN}', '{"300": 1}', '{"-1": 1}', "[1]", '{"5": "1"}', '{"1e3": 0}']),
    ("allowed_token_ids", ["[]", "[300]"]),
    ("bad_words", ['[""]', "[1]"]),
    ("seed", ["1.5", '"1"', "9223372036854775808"]),
    ("stream", ["1", '"true"']),
    ("stream_options", ['{"include_usage": true}', "true"]),
    ("logprobs", ["-1", "21", '"x"']),
    ("response_format", ['{"type": "json_object"}', '"json"']),
]  # fmt: skip


def test_values_out_of_range(server: ServerProcess) -> None:
    """S-07: each is refused by name on both routes, in strict JSON, and a neighbour is not touched."""
    with neighbour(server):
        for field, values in HOSTILE:
            for value in values:
                for path, rest in (
                    ("completions", '"prompt": "a"'),
                    ("chat/completions", f'"messages": {json.dumps(USER)}'),
                ):
                    body = f'{{{rest}, "{field}": {value}}}'
                    answer = server.http.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
                    assert answer.status_code in (400, 422), (body, answer.text)
                    error = strict_json(answer.text)["error"]
                    assert error["type"] == "invalid_request_error"
                    assert "internal" not in error["message"].lower()
                    if "null, " not in value:
                        assert field in error["message"] or field == error["param"], (body, error)


def test_legal_extremes(server: ServerProcess) -> None:
    """S-07: tiny temperatures are greedy, null is "not given"."""
    (greedy,) = ids_of(server.complete([5, 6, 7], max_tokens=20))
    for fields in (
        {"temperature": 1e-5},
        {"temperature": 1e-9},
        {"temperature": 5e-324},
        {"temperature": 1, "top_k": 1},
        {"temperature": 1, "top_p": 1e-9},
        {"temperature": 2, "min_p": 1.0},
        {"top_k": 10**9},
        {"top_k": 0},
        {"top_k": -1},
        {"repetition_penalty": 1.0, "logit_bias": {}},
        {"stop": [], "stop_token_ids": [], "bad_words": []},
    ):
        assert ids_of(server.complete([5, 6, 7], max_tokens=20, **fields)) == [greedy], fields
    nulls = dict.fromkeys(["top_p", "stop", "n", "seed", "logprobs", "stream", "stream_options", "logit_bias", "user"])
    assert ids_of(server.complete([5, 6, 7], max_tokens=20, **nulls)) == [greedy]
    for fields in ({"temperature": None}, {"max_tokens": None, "temperature": None}):
        answer = server.complete([5, 6, 7], **fields)
        assert answer["usage"]["completion_tokens"] <= 16  # the default of this route
    for fields in ({"repetition_penalty": 1e6}, {"repetition_penalty": 1e-6}, {"temperature": 2.0, "top_k": 10**12}):
        assert server.complete([5, 6, 7], max_tokens=20, ignore_eos=True, **fields)["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_first_token_completes_a_stop(server: ServerProcess, route: str, stream: bool) -> None:
    """S-33"""
    body: dict[str, Any] = {"stop": ["\n"], "logit_bias": {str(NEWLINE): 100}, "stream": stream, "max_tokens": 9}
    chat = route != "completions"
    body |= {"messages": USER, "logprobs": True, "top_logprobs": 5} if chat else {"prompt": "a", "logprobs": 5}
    response = server.http.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    chunks = events(response.text) if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    if chat:
        parts = [(choice.get("message") or choice.get("delta")).get("content") for choice in choices]
        entries = [len(choice["logprobs"]["content"]) for choice in choices if choice.get("logprobs")]
        assert sum(entries) <= 1
    else:
        parts = [choice["text"] for choice in choices]
        for lists in (choice["logprobs"] for choice in choices if choice["logprobs"]):
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            assert len({len(lists[name]) for name in names}) == 1
    assert "".join(part or "" for part in parts) == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 2, "max_tokens": 4},
        {"echo": True, "logprobs": 2, "max_tokens": 0},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "logprobs": 0, "max_tokens": 3, "n": 2, "seed": 4, "temperature": 1},
        {"echo": True, "logprobs": 2, "max_tokens": 4, "prompt": ["Tea is hot", "é🦜"]},
        {"logprobs": 2, "max_tokens": 9, "stop": "z"},
    ],
    ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items()),
)
def test_streamed_echo_and_logprobs(server: ServerProcess, fields: dict[str, Any]) -> None:
    """S-34: a stream's pieces joined are the whole answer."""
    body = {"prompt": "Tea is hot", "temperature": 0, **fields}
    whole = server.http.post("/v1/completions", json=body).json()
    chunks = events(server.http.post("/v1/completions", json={**body, "stream": True}).text)
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        if "logprobs" not in fields:
            continue
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces = [entry for c in own if c["logprobs"] for entry in c["logprobs"][name]]
            assert_close(pieces, choice["logprobs"][name])


def test_streamed_chat_with_logprobs_ends_well(server: ServerProcess) -> None:
    """S-34"""
    body = {"messages": USER, "logprobs": True, "stream": True, "max_tokens": 2, "logit_bias": {str(EOS): -100}}
    choices = [
        c for chunk in events(server.http.post("/v1/chat/completions", json=body).text) for c in chunk["choices"]
    ]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == 2
