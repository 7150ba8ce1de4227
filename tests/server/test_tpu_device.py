"""SmolLM2 served by hardpoint-tpu on JAX's processor back end: the API and the texts are those of any device.

Needs jax, torchax and the plugin in the environment; no TPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, events

pytest.importorskip("jax")

from hardpoint_platforms.discovery import discover

pytestmark = [
    pytest.mark.server,
    pytest.mark.real_model,
    pytest.mark.skipif(
        "tpu" not in discover().entries, reason="hardpoint-tpu is not installed: pip install -e plugins/tpu"
    ),
]

#: Few programs that compile fast.
FEW = [part for option in ("effort=0", "shapes=full", "growth=16") for part in ("--option", option)]
SMALL = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-batch-tokens", "64", "--num-kv-pages", "80"]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def server(make_server: Callable[..., ServerProcess], smollm2_path: Path) -> Iterator[ServerProcess]:
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        yield make_server(smollm2_path, "--device", "tpu", "--dtype", "float32", *FEW, *SMALL)
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = before


@pytest.fixture(scope="module")
def reference(make_server: Callable[..., ServerProcess], smollm2_path: Path) -> ServerProcess:
    return make_server(smollm2_path, "--device", "cpu", "--dtype", "float32", "--numerics", "exact", *SMALL)


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_it_says_what_it_runs_on(server: ServerProcess) -> None:
    assert "XLA on the processor, no TPU" in server.output()
    assert "one XLA program per step size" in server.output()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 40},
        {"temperature": 0, "logit_bias": {"7042": -100}, "repetition_penalty": 1.2},
        {"temperature": 0.9, "seed": 2**40 + 1, "n": 3},
        {"temperature": 0, "bad_words": ["Paris"], "min_tokens": 4},
    ],
    ids=["greedy", "drawn", "biased", "three", "bad words"],
)
def test_texts_are_those_of_another_device(
    server: ServerProcess, reference: ServerProcess, fields: dict[str, Any]
) -> None:
    ours, theirs = complete(server, **fields), complete(reference, **fields)
    assert [choice["text"] for choice in ours["choices"]] == [choice["text"] for choice in theirs["choices"]]


def test_log_probabilities(server: ServerProcess, reference: ServerProcess) -> None:
    fields = {"temperature": 0, "logprobs": 3, "echo": True}
    ours, theirs = (complete(one, **fields)["choices"][0]["logprobs"] for one in (server, reference))
    assert ours["tokens"] == theirs["tokens"]
    pairs = zip(ours["token_logprobs"][1:], theirs["token_logprobs"][1:], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 5e-3


def test_chat_streams(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    body = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 16, "stream": True}
    chunks = events(server.http.post("/v1/chat/completions", json=body).text)
    assert "Paris" in "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_what_no_program_has_room_for_is_refused(server: ServerProcess) -> None:
    bias = {str(token): 1 for token in range(1000)}
    words = [f"word{number} more" for number in range(100)]
    body = {"prompt": PROMPT, "logit_bias": bias, "bad_words": words}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "at most 1024 biased tokens" in response.text


def test_nothing_was_compiled_while_requests_waited(server: ServerProcess) -> None:
    assert "while requests waited" not in server.output()
    server.wait_idle()
