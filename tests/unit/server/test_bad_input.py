"""Every kind of bad input gets a 4xx in OpenAI's shape that names the field, and the engine never sees it."""

from __future__ import annotations

import json

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
DEEP = 100_000

#: field -> values that both endpoints refuse, with the field as param
NUMBERS = {
    "temperature": [-0.1, 2.1, 1e308, "0.7", True, [], {}],
    "top_p": [0, -1, 1.5, "1", True],
    "top_k": [-2, 1.5, 1.0, "5", True],
    "min_p": [-0.1, 1.1, True],
    "presence_penalty": [-2.1, 2.1, 1e308, "1"],
    "frequency_penalty": [-2.1, 2.1, True],
    "repetition_penalty": [0, -1, "1"],
    "n": [0, -1, 129, 1_000_000, 1.0, True, "2", 10**30],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "max_tokens": [-1, 1.5, "5", True, 10**9],
    "min_tokens": [-1, "1", 1.5],
    "stop_token_ids": [[-1], [10**6], ["a"], 5, [True], "2"],
    "allowed_token_ids": [[], [-1], [10**6], [1.5]],
    "logit_bias": [{"a": 1}, {"1.5": 1}, {"-1": 1}, {str(10**6): 1}, [1], 5, {" 1": 1}, {"1_0": 1}],
    "stop": [[""], "", ["a"] * 17, ["x" * 1025], 5, [1], {}],
    "bad_words": [[""], "a", ["a"] * 129, [5]],
    "stream": [1, "true", []],
    "echo": [1, "yes"],
    "ignore_eos": [1],
    "stream_options": [{"include_usage": True}, 5],
    "priority": [2**63, "1", 1.5],
    "cache_salt": ["", "x" * 1025, 5],
    "request_id": ["", "x" * 129, "a b", 5],
    "timeout": [0, -1, -0.5, "5", True],
    "truncate_prompt_tokens": [0, -2, "1"],
    "prompt_logprobs": [-1, 21, True, "1"],
    "model": [5, [], True],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, {}, "text", 5],
    "structured_outputs": [{"regex": "a"}],
    "guided_json": [{}],
    "use_beam_search": [True],
    "logprob_token_ids": [[1]],
    "skip_special_tokens": [1],
    "user": [5],
}
TABLE = [(name, value) for name, values in NUMBERS.items() for value in values]


def error_of(response) -> dict:
    body = json.loads(response.content, parse_constant=lambda name: pytest.fail(name))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def param_is(error: dict, name: str) -> bool:
    param = error["param"] or ""
    return param == name or param.startswith((f"{name}[", f"{name}."))


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("name", "value"), TABLE, ids=lambda v: str(v)[:24])
def test_each_bad_value_names_its_field(harness, path, name, value) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    response = harness.post(path, json.dumps({**body, name: value}).encode())
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert param_is(error, name), error
    assert error["type"] == "invalid_request_error"
    assert harness.client.calls == []


CHAT_ONLY = [
    ({}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True}, "messages"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
]
TEXT_ONLY = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": ["a", [5]]}, "prompt"),
    ({"prompt": [5, [5]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [(CHAT, *case) for case in CHAT_ONLY] + [(TEXT, *case) for case in TEXT_ONLY],
    ids=lambda v: str(v)[:40],
)
def test_fields_of_one_endpoint(harness, path, change, param) -> None:
    base = {} if change == {} else ({"messages": USER} if path == CHAT else {"prompt": "hi"})
    response = harness.post(path, json.dumps({**base, **change}).encode())
    assert response.status_code == 400, response.text
    assert param_is(error_of(response), param), response.text
    assert harness.client.calls == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_null_means_not_given(harness, path) -> None:
    fields = [*NUMBERS, "tools", "tool_choice", "functions", "logprobs", "top_logprobs", "suffix", "best_of"]
    body = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    response = harness.post(path, {**dict.fromkeys(fields), **body})
    assert response.status_code == 200, response.text
    params = harness.client.calls[0]["params"]
    assert params.temperature == 1.0
    assert params.stop == ()


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "n"])
def test_numbers_that_json_has_not(harness, path, field, number) -> None:
    body = '"messages":[{"role":"user","content":"x"}]' if path == CHAT else '"prompt":"hi"'
    response = harness.post(path, f'{{{body},"{field}": {number}}}'.encode())
    assert response.status_code == 400
    assert error_of(response)["param"] == field


LONE = {
    "model": "?", "stop": "?", "bad_words": ["a", "?"], "cache_salt": "?", "request_id": "?", "user": "?",
    "zz": {"a": ["?"]}, "logit_bias": {"?": 1}, "response_format": {"type": "?"},
}  # fmt: skip
LONE_TEXT = {"prompt": "?", "suffix": "?"}
LONE_CHAT = {
    "messages": [*USER, {"role": "user", "content": "?", "name": "?"}], "tools": [{"type": "?"}],
    "chat_template_kwargs": {"a": "?"}, "documents": [{"?": "?"}], "reasoning_effort": "?",
}  # fmt: skip


@pytest.mark.parametrize(
    "lone", ["\\ud800", "\\uDFFF", "x\\udbff\\u0041", "\\udc00\\ud83e", "\\\\\\ud800", "\\ud83e\\udd9c\\ud83e"]
)
@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(TEXT, *item) for item in (LONE | LONE_TEXT).items()] + [(CHAT, *item) for item in (LONE | LONE_CHAT).items()],
    ids=str,
)
def test_lone_surrogates_name_their_field(harness, path, name, value, lone) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "hi, [{ you"}
    response = harness.post(path, json.dumps({**body, name: value}).replace("?", lone).encode())
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert "lone surrogate" in error["message"]
    keys = "?" in value if isinstance(value, dict) else name == "documents"  # a key has no path of its own
    assert keys or param_is(error, name), error
    assert harness.client.calls == []


def test_surrogates_in_pairs_and_escaped_ones_are_texts(harness) -> None:
    assert harness.post(TEXT, b'{"prompt":"\\ud83e\\udd9c \\\\ud800"}').status_code == 200
    assert bytes(t - 3 for t in harness.client.calls[0]["prompt"]).decode() == "🦜 \\ud800"
    broken = error_of(harness.post(TEXT, b'{"prompt":"\\ud800" "x"}'))
    assert "not valid JSON" in broken["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize", "/abort_requests"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"   ", b"{", b"[]", b"null", b"5", b'"x"', b"{'a':1}", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"a":"\xff"}',
        b'{"prompt":"x","tokens":[],"request_ids":[]} trailing', b'{"prompt":"x"}}', b'{"prompt":"\\ud800"}',
        b"[" * DEEP, b'{"a":' * DEEP, b'{"zz":' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"zz":' + b'{"a":' * 101 + b"1" + b"}" * 102, b'{"prompt":' + b"9" * 5000 + b"}", b"\x00", b"{\x00}",
    ],
    ids=lambda b: str(b[:20]),
)  # fmt: skip
def test_bodies_that_are_no_json_object(harness, path, body) -> None:
    response = harness.post(path, body)
    assert response.status_code == 400, response.text
    error_of(response)


@pytest.mark.parametrize(
    "place",
    [
        '{{"messages":[{{"role":"user","content":"x"}}],"zz":{}}}',
        '{{"messages":[{{"role":"user","content":"x"}}],"metadata":{{"a":{}}}}}',
        '{{"messages":[{{"role":"user","content":{}}}]}}',
        '{{"messages":[{{"role":"user","content":"x"}}],"tools":[{{"function":{{"parameters":{}}}}}]}}',
        '{{"messages":[{{"role":"user","content":"x"}}],"response_format":{{"json_schema":{}}}}}',
    ],
)
@pytest.mark.parametrize("depth", [1_000, DEEP])
def test_deep_nesting_anywhere(harness, place, depth) -> None:
    for opening, closing in (("[", "]"), ('{"items":', "}")):
        nested = opening * depth + "1" + closing * depth
        response = harness.post(CHAT, place.format(nested).encode())
        assert response.status_code == 400
        assert "nested" in error_of(response)["message"]


def test_harmless_oddities_are_served(harness) -> None:
    brackets = "[" * 5000 + '\\"{' * 10
    body = {"messages": [{"role": "user", "content": "ok"}], "zz": {"deep": [[[[1]]]]}, "metadata": {"a": brackets}}
    assert harness.post(CHAT, body).status_code == 200
    assert harness.post(TEXT, b'{"n":1,"n":2,"prompt":"hi"}').json()["choices"][1]["index"] == 1
    assert harness.post(TEXT, {"prompt": "hi", "best_of": 2, "n": 2, "suffix": ""}).status_code == 200
    served = {
        "tools": None,
        "response_format": {"type": "text"},
        "store": True,
        "service_tier": "auto",
        "modalities": ["text"],
    }
    assert harness.post(CHAT, {"messages": USER, **served}).status_code == 200


def test_unknown_model_names_the_served_ones(harness) -> None:
    for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        response = harness.post(path, {**body, "model": "nope"})
        error = error_of(response)
        assert response.status_code == 404
        assert (error["param"], error["code"], error["type"]) == ("model", "model_not_found", "not_found_error")
        assert "tiny" in error["message"]
        assert "small" in error["message"]


def test_prompt_longer_than_the_context_names_both_numbers(harness) -> None:
    for path, body, param in (
        (TEXT, {"prompt": "x" * 300}, "prompt"),
        (TEXT, {"prompt": [5] * 256}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
    ):
        error = error_of(harness.post(path, body))
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
        assert "256" in error["message"]
    error = error_of(harness.post(TEXT, {"prompt": "x" * 200, "max_tokens": 57}))
    assert error["param"] == "max_tokens"
    assert {"200", "56", "57", "256"} <= set(
        error["message"].replace(",", "").replace(".", "").replace(";", "").split()
    )
    assert harness.client.calls == []


def test_errors_do_not_repeat_long_input(harness) -> None:
    for body in ({"messages": [{"role": "w" * 10**5, "content": "x"}]}, {"messages": USER, "model": "m" * 10**5}):
        assert len(harness.post(CHAT, body).content) < 2000
