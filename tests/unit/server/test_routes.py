"""The smaller routes, errors of HTTP itself, and request ids."""

from __future__ import annotations

import json

import pytest

from hardpoint.errors import EngineBusy, EngineDead
from hardpoint.request.output import SequenceDelta


def test_models(harness) -> None:
    listed = harness.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "small"]
    assert listed["data"][0]["max_model_len"] == 256
    assert listed["data"][0]["object"] == "model"
    assert harness.get("/v1/models/small").json()["id"] == "small"
    missing = harness.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_tokenize_and_back(harness) -> None:
    harness.tokenizer.adds_bos = True
    answer = harness.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer["tokens"] == [1, 3 + 0x68, 3 + 0xC3, 3 + 0xA9]
    assert (answer["count"], answer["max_model_len"]) == (4, 256)
    assert answer["token_strs"][:2] == ["<s>", "h"]
    assert harness.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "<s>hé"}
    assert harness.post("/tokenize", {"prompt": "h", "add_special_tokens": False}).json()["tokens"] == [3 + 0x68]
    chat = harness.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    harness.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    assert chat["tokens"] == harness.client.calls[-1]["prompt"]
    assert chat["token_strs"] is None


def test_detokenize_out_of_range(harness) -> None:
    for tokens in ([-1], [10**6], [5, 10**30]):
        response = harness.post("/detokenize", {"tokens": tokens})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"tokens[{len(tokens) - 1}]"
    assert harness.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_tokenize_needs_one_form(harness) -> None:
    response = harness.post("/tokenize", {"model": "tiny"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_unknown_routes_and_methods_in_the_error_shape(harness) -> None:
    missing = harness.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"
    wrong = harness.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    assert harness.get("/v1/models/").status_code == 404


def test_request_id_is_echoed_and_names_the_answer(harness) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    response = harness.post("/v1/chat/completions", body, headers={"X-Request-Id": "trace-7"})
    assert response.headers["x-request-id"] == "trace-7"
    assert response.json()["id"] == "chatcmpl-trace-7"
    assert harness.client.calls[-1]["id"] == "trace-7"
    own = harness.post("/v1/completions", {"prompt": "x", "request_id": "mine"})
    assert own.json()["id"] == "cmpl-mine"
    for bad in ("a b", "x" * 129, "\u00e9"):
        made = harness.get("/version", headers={"X-Request-Id": bad.encode()}).headers["x-request-id"]
        assert made != bad
        assert len(made) == 24


def test_health_tells_the_engines_state(harness) -> None:
    for path in ("/health", "/live", "/ready"):
        assert harness.get(path).status_code == 200
        assert harness.request("HEAD", path).status_code == 200
    for state, code in ((EngineBusy("loading"), "not_ready"), (EngineDead("gone"), "engine_dead")):
        harness.client.health = state
        assert harness.get("/live").status_code == 200
        for path in ("/health", "/ready", "/v1/models"):
            response = harness.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, code)
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            assert harness.post(path, body).status_code == 503
    assert "hardpoint:kv_pages_total" in harness.get("/metrics").text


def test_cache_reset_and_version(harness) -> None:
    assert harness.post("/reset_prefix_cache").status_code == 200
    assert harness.client.resets == 1
    assert set(harness.get("/version").json()) == {"version"}


def test_openapi_describes_bodies(harness) -> None:
    document = harness.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    reference = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/ChatRequest"
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    assert "temperature" in schema["properties"]
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"], name
    assert harness.get("/docs").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_timeout_is_the_engines_deadline(harness, path, stream) -> None:
    harness.client.script = lambda prompt, params: [
        SequenceDelta(0, "so far", (5,)),
        SequenceDelta(0, finish_reason="timeout"),
    ]
    body = {"prompt": ["x", "y"]} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    response = harness.post(path, {**body, "timeout": 1.5, "stream": stream})
    assert response.status_code == 200
    assert '"finish_reason":"timeout"' in response.text
    assert "so far" in response.text
    assert {call["deadline"] for call in harness.client.calls} == {1.5}
    harness.post(path, body)
    assert harness.client.calls[-1]["deadline"] is None


def test_timeout_is_described(harness) -> None:
    schemas = harness.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        assert "finish_reason 'timeout'" in json.dumps(schemas[name]["properties"]["timeout"])


def test_fields_reach_the_engine(harness) -> None:
    body = {
        "prompt": "x", "n": 2, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 0, "stop": "end",
        "stop_token_ids": [5], "logit_bias": {"7": 200, "8": -1}, "allowed_token_ids": [7, 8], "bad_words": ["no"],
        "min_tokens": 2, "ignore_eos": True, "repetition_penalty": 1.5, "priority": -3, "cache_salt": "s",
        "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 3,
    }  # fmt: skip
    assert harness.post("/v1/completions", body).status_code == 200
    call = harness.client.calls[0]
    params = call["params"]
    assert (call["priority"], call["salt"]) == (-3, "s")
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (2, 0.0, 0.5, 7, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids) == (0, ("end",), (5,))
    assert params.logit_bias == {7: 100.0, 8: -1.0}
    assert (params.allowed_token_ids, params.bad_words) == ((7, 8), ("no",))
    assert (params.min_tokens, params.max_tokens, params.logprobs, params.prompt_logprobs) == (2, 16, 3, None)
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens


def test_chat_takes_what_is_left_of_the_context(harness) -> None:
    harness.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": None})
    call = harness.client.calls[0]
    assert call["params"].max_tokens == 256 - len(call["prompt"])
    harness.post("/v1/completions", {"prompt": "x" * 250})
    assert harness.client.calls[1]["params"].max_tokens == 6
    harness.post("/v1/completions", {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True})
    assert harness.client.calls[2]["prompt"] == [3 + ord("e"), 3 + ord("f")]


def test_messages_become_a_prompt(harness) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"k": "unfin'}}
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]},
        {"role": "assistant", "content": "So: "},
    ]
    options = {"continue_final_message": True, "echo": True, "max_tokens": 1, "chat_template_kwargs": {"think": False}}
    response = harness.post("/v1/chat/completions", {"messages": messages, **options})
    assert response.json()["choices"][0]["message"]["content"] == "So: a"
    rendered, given = harness.tokenizer.rendered
    assert [m["role"] for m in rendered] == ["system", "user", "assistant", "tool", "assistant"]
    assert rendered[2]["content"] == ""
    assert (given["continue_final_message"], given["add_generation_prompt"]) == (True, False)
    assert given["think"] is False
    harness.tokenizer.chat_template = None
    refused = harness.post("/v1/chat/completions", {"messages": messages})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "chat template" in refused.json()["error"]["message"]
