"""SmolLM2-135M-Instruct over HTTP: sense, and the cases where text and tokenizer matter (S-01, S-03, S-04, S-25)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, assert_close, events

pytestmark = [pytest.mark.server, pytest.mark.real_model]

EOS = 2
PARIS = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
#: Space, letters and digits of several scripts, characters of 2 to 4 bytes, one made of several code points.
TEXT = "Hello naïve Zürich, 東京は夜の七時 🦜 and 👩‍👩‍👧 done; Привет, κόσμε!"


@pytest.fixture(scope="module")
def server(make_server: Callable[..., ServerProcess], smollm2_path: Path) -> ServerProcess:
    """In fp32, so that the reference's numbers are ours."""
    return make_server(smollm2_path, "--max-model-len", "1024", "--num-kv-pages", "200", "--dtype", "float32")


def text_of(server: ServerProcess, body: dict[str, Any]) -> str:
    """The text of a completion, which must be the same streamed and whole."""
    whole = server.http.post("/v1/completions", json=body)
    assert whole.status_code == 200, whole.text
    text = str(whole.json()["choices"][0]["text"])
    stream = events(server.http.post("/v1/completions", json={**body, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in stream) == text
    return text


def test_chat_makes_sense(server: ServerProcess) -> None:
    chat = server.client.chat.completions
    model = server.model
    whole = chat.create(model=model, messages=PARIS, temperature=0, max_tokens=20)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in whole.choices[0].message.content
    stream = chat.create(model=model, messages=PARIS, temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([19556, 15107, 116], ("🦜", "\ufffd")), ([19556, 10813, 116], ("🦜", "\ufffd")), ([19556], None)],
)
def test_a_prompt_that_ends_within_a_character(server: ServerProcess, prompt: list[int], text: Any) -> None:
    """S-01: the prompt is not told again; the character that lies over the border comes once at most."""
    body = {"prompt": prompt, "max_tokens": 3, "logit_bias": {"246": 100}, "temperature": 0}
    found = text_of(server, body)
    assert "Hello" not in found
    if text is not None:
        assert found.startswith(text)
    assert found.count("🦜") <= 1


def test_cut_points_of_a_text(server: ServerProcess) -> None:
    """S-01: wherever a prompt is cut, the output does not begin with it."""
    tokens = server.http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    draw = random.Random(3)
    cuts = [[begin, draw.randint(begin + 2, len(tokens))] for begin in draw.choices(range(len(tokens) - 2), k=24)]
    prompts = [tokens[begin:end] for begin, end in cuts]
    body = {"prompt": prompts, "max_tokens": 2, "logit_bias": {"198": 100}, "temperature": 0}
    for choice in server.http.post("/v1/completions", json=body).json()["choices"]:
        assert choice["text"].lstrip("\ufffd") == "\n\n", (prompts[choice["index"]], choice["text"])


@pytest.mark.parametrize(("length", "least"), [(2, 4), (60, 4), (5, 0), (5, 1)])
def test_min_tokens(server: ServerProcess, length: int, least: int) -> None:
    """S-03"""
    answer = server.complete([504] * length, min_tokens=least, max_tokens=9, logit_bias={str(EOS): 100})
    assert answer["choices"][0]["token_ids"].index(EOS) == least
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_scores_of_a_prompt(server: ServerProcess) -> None:
    """S-04: shapes here; the values are compared with transformers on a tiny model."""
    zero = server.complete("The kettle is on", echo=True, logprobs=1, max_tokens=0)
    three = server.complete("The kettle is on", echo=True, logprobs=1, max_tokens=3)
    lists = zero["choices"][0]["logprobs"]
    assert zero["choices"][0]["text"] == "The kettle is on" == "".join(lists["tokens"])
    assert zero["choices"][0]["prompt_token_ids"] == [504, 44328, 314, 335]
    assert zero["usage"]["completion_tokens"] == 0
    assert lists["tokens"] == ["The", " kettle", " is", " on"]
    assert lists["text_offset"] == [0, 3, 10, 13]
    assert lists["token_logprobs"][0] is None
    longer = three["choices"][0]["logprobs"]
    assert_close(longer["token_logprobs"][:4], lists["token_logprobs"])
    assert len(longer["tokens"]) == 7
    assert "".join(longer["tokens"]) == three["choices"][0]["text"]


def test_tokenizing(server: ServerProcess) -> None:
    """S-25: single ids for markers, no BOS of its own, the template of the file."""

    def ids(text: str, **fields: Any) -> list[int]:
        return list(server.http.post("/tokenize", json={"prompt": text, **fields}).json()["tokens"])

    marked = ids("<|im_start|>user\nhi<|im_end|>")
    assert (marked[0], marked[-1]) == (1, 2)
    assert len(marked) == 5
    assert ids("hi", add_special_tokens=True) == ids("hi", add_special_tokens=False)
    assert len(ids("hi")) == 1
    assert ids("\n") == [198]
    assert ids("🦜") == [10813, 116, 246]
    assert ids("") == []
    for text in (TEXT, " \n\t  x", "1234567", "a" * 500, "<|im_start|>", "<|im_"):
        assert server.http.post("/detokenize", json={"tokens": ids(text)}).json()["prompt"] == text
    chat = server.http.post("/tokenize", json={"messages": PARIS}).json()["tokens"]
    shown = server.http.post("/detokenize", json={"tokens": chat}).json()["prompt"]
    assert f"<|im_start|>user\n{PARIS[0]['content']}<|im_end|>\n" in shown
    assert shown.endswith("<|im_start|>assistant\n")


def test_the_first_token_completes_a_stop(server: ServerProcess) -> None:
    """S-33"""
    body = {"prompt": "a", "stop": ["\n"], "logit_bias": {"198": 100}, "logprobs": 5, "max_tokens": 5}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert len({len(choice["logprobs"][name]) for name in ("tokens", "token_logprobs", "top_logprobs")}) == 1


def test_a_stop_within_the_text(server: ServerProcess) -> None:
    """Every cut of a sensible text, also in the middle of a token."""
    body: dict[str, Any] = {"prompt": "Water boils when", "max_tokens": 12, "temperature": 0}
    text = text_of(server, body)
    for begin in range(2, len(text) - 5, 15):
        stop = text[begin : begin + 5]
        assert text_of(server, {**body, "stop": [stop, "nowhere"]}) == text[: text.find(stop)]


def test_characters_stay_whole_in_a_stream(server: ServerProcess) -> None:
    """Tokens that hold parts of characters: no delta holds a half, and none is lost."""
    forced = [10813, 116, 246]
    body = {"prompt": "a", "max_tokens": 12, "allowed_token_ids": forced, "seed": 4, "temperature": 1, "stream": True}
    raw = server.http.post("/v1/completions", json={**body, "return_token_ids": True}).text
    chunks = events(raw)
    ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    whole = server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == whole
    assert json.dumps(text)
