"""S-04: scoring a prompt over HTTP, its values against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, assert_close

pytestmark = pytest.mark.server

WORDS = "The kettle is on"
PROMPT = [11 + 7 * i % 250 for i in range(90)]


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Any:
    """reference(ids) -> log-probabilities, float32 [T, V]; row p is about the token at p + 1."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager", dtype=torch.float32)

    def score(ids: list[int]) -> Any:
        with torch.no_grad():
            return torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float(), -1)

    return score


def score(server: ServerProcess, prompt: Any, **fields: Any) -> dict[str, Any]:
    return dict(server.complete(prompt, **{"echo": True, "logprobs": 1, **fields}))


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize(
    "prompt", [WORDS, "x", "</s>", "日本 🦜é", PROMPT], ids=["words", "one", "eos", "multi", "ids"]
)
def test_values_of_a_prompt(server: ServerProcess, reference: Any, prompt: Any, max_tokens: int) -> None:
    is_text = isinstance(prompt, str)
    ids = server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"] if is_text else prompt
    answer = score(server, prompt, max_tokens=max_tokens, ignore_eos=True)
    choice = answer["choices"][0]
    lists = choice["logprobs"]
    generated = choice["token_ids"]
    assert choice["prompt_token_ids"] == ids
    assert len(generated) == answer["usage"]["completion_tokens"] == max_tokens
    assert {len(lists[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
        len(ids) + max_tokens
    }
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    rows = reference(ids + generated)
    wanted = [float(rows[at, token]) for at, token in enumerate((ids + generated)[1:])]
    assert_close(lists["token_logprobs"][1:], wanted)
    best = [float(row.max()) for row in rows[: len(wanted)]]
    assert_close([max(candidates.values()) for candidates in lists["top_logprobs"][1:]], best)
    assert generated == rows[len(ids) - 1 : len(ids) - 1 + max_tokens].argmax(-1).tolist()
    if is_text:
        assert choice["text"].startswith(prompt)
    whole = "".join(lists["tokens"])
    if "bytes:" not in whole:
        assert whole == choice["text"]
        assert [choice["text"][at:].startswith(t) for at, t in zip(lists["text_offset"], lists["tokens"], strict=True)]
    assert lists["text_offset"] == sorted(lists["text_offset"])


def test_prompt_logprobs_with_cache_and_crowd(server: ServerProcess, reference: Any) -> None:
    """S-22: cold, behind a prefix hit, and with neighbours: the same values, none missing."""
    rows = reference(PROMPT)
    wanted = [float(rows[at, token]) for at, token in enumerate(PROMPT[1:])]
    server.http.post("/reset_prefix_cache")
    for before in ([], [[*PROMPT[:40], 5]], [PROMPT]):
        for prompt in before:
            server.complete(prompt, max_tokens=2)
        answer = score(server, PROMPT, prompt_logprobs=2, max_tokens=1)
        scored = answer["choices"][0]["prompt_logprobs"]
        assert scored[0] is None
        assert_close(
            [entry[str(token)]["logprob"] for entry, token in zip(scored[1:], PROMPT[1:], strict=True)], wanted
        )
        assert all(len(entry) in (2, 3) for entry in scored[1:])


def test_what_cannot_be_scored(server: ServerProcess) -> None:
    for fields, field in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ):
        answer = server.http.post("/v1/completions", json={"prompt": WORDS, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
