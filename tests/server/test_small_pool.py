"""A base model in a small pool, behind a key: S-08 (what never fits), S-41 (rows without a token), refusals of chat."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, events

pytestmark = pytest.mark.server


def test_more_than_the_pool_holds(small_server: ServerProcess) -> None:
    """S-08: context 512, but 320 tokens of pages: refused or ended, never parked, and the queue moves on."""
    server = small_server
    prompt = [5 + i % 200 for i in range(400)]
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(server.http.post, "/v1/completions", json={"prompt": prompt, "stream": stream})
            for stream in (False, True)
        ]
        long = {"prompt": prompt[:300], "max_tokens": 100, "ignore_eos": True}
        ending = pool.submit(server.http.post, "/v1/completions", json=long)
        short = [pool.submit(server.complete, [7, n], max_tokens=5, ignore_eos=True) for n in range(5)]
        for job in jobs:
            refused = job.result(60)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert "400" in message
            assert "320" in message or "20" in message, message
        answer = ending.result(60)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        else:
            assert answer.status_code == 400
            assert re.search(r"\b(400|320)\b", answer.json()["error"]["message"])
        assert [job.result(60)["usage"]["completion_tokens"] for job in short] == [5] * 5
    server.wait_idle()
    whole = server.complete(prompt[:310], max_tokens=10, ignore_eos=True)
    assert whole["usage"]["total_tokens"] == 320


def test_n_that_does_not_fit_at_once(small_server: ServerProcess) -> None:
    """Each sequence fits alone: they take turns."""
    body = {"prompt": [9] * 30, "max_tokens": 200, "n": 6, "ignore_eos": True, "seed": 3, "temperature": 1}
    answer = small_server.http.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [200] * 6
    again = small_server.http.post("/v1/completions", json={**body, "return_token_ids": True, "n": 2}).json()
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in answer["choices"][:2]]
    assert small_server.metrics()["vllm:num_preemptions_total"] > 0
    small_server.wait_idle()


def test_without_chunked_prefill(make_server: Callable[..., ServerProcess], make_folder: Callable[..., Path]) -> None:
    """S-08: a prompt longer than a step's budget is refused by number, never parked."""
    flags = ("--num-kv-pages", "40", "--max-batch-tokens", "64", "--no-chunked-prefill", "--max-num-seqs", "8")
    server = make_server(make_folder(), *flags)
    refused = server.http.post("/v1/completions", json={"prompt": [9] * 100, "max_tokens": 4})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "100" in error["message"]
    assert "64" in error["message"]
    jobs = [server.complete([9] * 60, max_tokens=30, ignore_eos=True) for _ in range(2)]
    assert [job["usage"]["completion_tokens"] for job in jobs] == [30, 30]
    server.wait_idle()
    server.send(signal.SIGTERM)
    assert server.end() == 0


def test_rows_without_a_token(small_server: ServerProcess) -> None:
    """S-41: 512 rows, 500 tokens. The other rows are text that is empty, the same in a stream."""
    body = {
        "prompt": [5, 6],
        "temperature": 2,
        "top_k": -1,
        "max_tokens": 200,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    for seed in range(10):
        choice = small_server.complete(**{**body, "seed": seed})["choices"][0]
        if seed < 2:
            stream = small_server.http.post("/v1/completions", json={**body, "seed": seed, "stream": True})
            assert "".join(chunk["choices"][0]["text"] for chunk in events(stream.text)) == choice["text"]
        known = [token for token in choice["token_ids"] if token < 500]
        assert small_server.http.post("/detokenize", json={"tokens": choice["token_ids"]}).json() == (
            small_server.http.post("/detokenize", json={"tokens": known}).json()
        )
        ids += choice["token_ids"]
    assert len(ids) == 2000
    assert len(set(ids)) > 200
    assert max(ids) < 512


def test_naming_rows_without_a_token(small_server: ServerProcess) -> None:
    """S-41: 400, or an answer; never an index error."""
    for fields in (
        {"logit_bias": {"505": 100}},
        {"allowed_token_ids": [505]},
        {"stop_token_ids": [505]},
        {"prompt": [505, 6]},
        {"logprobs": 20, "temperature": 2},
    ):
        for stream in (False, True):
            body = {"prompt": [5, 6], "max_tokens": 8, "stream": stream, **fields}
            answer = small_server.http.post("/v1/completions", json=body)
            assert answer.status_code in (200, 400), (fields, answer.text)
            if answer.status_code == 200 and stream:
                events(answer.text)
    for fields in (
        {"prompt": [512]},
        {"prompt": [-1]},
        {"prompt": [2**40]},
        {"logit_bias": {"512": 1}},
        {"stop_token_ids": [512]},
    ):
        answer = small_server.http.post("/v1/completions", json={"prompt": "a", **fields})
        assert answer.status_code == 400, fields
        assert answer.json()["error"]["param"].startswith(next(iter(fields)))


def test_chat_with_a_base_model(small_server: ServerProcess) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = small_server.http.post(path, json={"messages": [{"role": "user", "content": "hi"}]})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "no chat template" in error["message"]
        assert "/v1/completions" in error["message"]
        assert error["param"] == "messages"


def test_the_key_guards_every_route_but_health(small_server: ServerProcess) -> None:
    routes = [(m, p) for p, methods in _document(small_server)["paths"].items() for m in methods]
    assert len(routes) >= 12
    routes += [
        ("get", "/nothing"),
        ("get", "/docs"),
        ("get", "/openapi.json"),
        ("post", "/v1/chat/completions/"),
        ("get", "//health"),
    ]
    for method, path in routes:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}, {"X-Api-Key": "sesame"}):
            answer = httpx.request(
                method, small_server.url + path, headers=headers, json={} if method == "post" else None
            )
            if path in ("/health", "/live", "/ready"):
                assert answer.status_code == 200
                assert answer.content == b""
            else:
                assert answer.status_code == 401, (method, path, headers)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert "sesame" not in answer.text
    assert "sesame" not in small_server.output()
    assert "sesame" not in " ".join(small_server.engine.cmdline())


def _document(server: ServerProcess) -> dict[str, Any]:
    return dict(server.http.get("/openapi.json").json())
