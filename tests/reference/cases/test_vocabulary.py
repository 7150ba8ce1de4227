"""Models with more rows than their tokenizer has tokens, with fewer, and with an odd number of them (case S-41)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver

from hardpoint import LLM, SamplingParams
from hardpoint.errors import RequestError

pytestmark = pytest.mark.reference

ROWS = 512


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | changes))


def _words(tokens: int) -> list[str]:
    return [f" w{number}" for number in range(tokens - 258)]


@pytest.fixture(scope="module")
def padded(make_llama: Any) -> Path:
    """512 rows, a tokenizer of 500."""
    return Path(make_llama(_words(500), vocab_size=ROWS))


def test_rows_without_a_token_have_no_text(device: str, padded: Path, start: Any, prompt_of: Any) -> None:
    driver: Driver = start(padded, device=device)
    assert (driver.tokenizer.vocab_size, driver.info.vocab_size) == (500, ROWS)
    params = _params(temperature=2.0, top_k=-1, max_tokens=200, n=10, seed=1, logprobs=20)
    answers = driver.ask(prompt_of(10), params)
    drawn = Counter(token for answer in answers for token in answer.token_ids)
    assert sum(drawn.values()) == 2000
    assert 0 <= min(drawn) <= max(drawn) < ROWS
    beyond = [(t, e) for answer in answers for p in answer.logprobs for t, e in p.items() if t >= 500]
    assert beyond, "the test must see such rows"
    assert all(entry.decoded_token == "" for _, entry in beyond)
    for answer in answers:
        visible = [token for token in answer.token_ids if token < 500]
        assert answer.text == driver.tokenizer.decode(visible)


def test_a_config_that_leaves_the_rows_to_its_family(device: str, make_llama: Any, start: Any, prompt_of: Any) -> None:
    """Gemma 3's configs, for one, do not say vocab_size."""
    folder = Path(make_llama(_words(500), vocab_size=32000))  # Llama's default
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["vocab_size"]
    path.write_text(json.dumps(config))
    answer = start(folder, device=device).ask_one(prompt_of(10), _params(logit_bias={31999: 100.0}, logprobs=1))
    assert (answer.token_ids, answer.text) == ([31999] * 8, "")


def test_such_a_row_may_be_forced(device: str, padded: Path, start: Any, prompt_of: Any) -> None:
    driver: Driver = start(padded, device=device)
    forced = driver.ask_one(prompt_of(10), _params(logit_bias={505: 100.0}, logprobs=2, stop=("x",)))
    assert (forced.token_ids, forced.text) == ([505] * 8, "")
    # it is a stop token like any other, and may stand in a prompt
    stopped = driver.ask_one([3, 505, 511, 4], _params(logit_bias={505: 100.0}, stop_token_ids=(505,)))
    assert (stopped.token_ids, stopped.text, stopped.stop_reason) == ([505], "", 505)
    allowed = driver.ask_one(prompt_of(10), _params(allowed_token_ids=(400, 511), temperature=3.0, seed=1))
    assert set(allowed.token_ids) <= {400, 511}


BEYOND: list[tuple[str, dict[str, Any], list[int]]] = [
    ("prompt", {}, [3, ROWS, 4]),
    ("prompt", {}, [3, -1, 4]),
    ("prompt", {}, [2**40]),
    ("logit_bias", {"logit_bias": {ROWS: 1.0}}, [3]),
    ("logit_bias", {"logit_bias": {-1: 1.0}}, [3]),
    ("logit_bias", {"logit_bias": {"512": 1.0}}, [3]),
    ("stop_token_ids", {"stop_token_ids": (ROWS,)}, [3]),
    ("allowed_token_ids", {"allowed_token_ids": (1, ROWS)}, [3]),
    ("allowed_token_ids", {"allowed_token_ids": (-1,)}, [3]),
]


@pytest.mark.parametrize(("field", "changes", "prompt"), BEYOND, ids=str)
def test_ids_beyond_the_rows_are_refused(
    field: str, changes: dict[str, Any], prompt: list[int], device: str, padded: Path, start: Any
) -> None:
    driver: Driver = start(padded, device=device)
    with pytest.raises(RequestError) as caught:
        driver.submit(prompt, _params(**changes))
    assert caught.value.field == field
    assert driver.ask_one([3], _params()).finish_reason == "length"


@pytest.fixture(scope="module")
def short(make_llama: Any) -> Path:
    """512 rows, a tokenizer of 520, whose end token is one of those without a row."""
    folder = Path(make_llama(_words(520), vocab_size=ROWS, eos_token_id=[1, 515]))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": " w257"}))
    return folder


def test_tokens_without_a_row(device: str, short: Path, start: Any) -> None:
    driver: Driver = start(short, device=device)
    (word,) = driver.tokenizer.encode(" w254")
    assert word == ROWS
    with pytest.raises(RequestError) as caught:
        driver.submit(" w254", _params())
    assert caught.value.field == "prompt"
    with LLM(str(short), device=device, dtype="float32", num_kv_pages=32) as llm:
        with pytest.raises(RequestError, match="512"):
            llm.generate([" w3", " w254"], _params(), use_tqdm=False)
        assert len(llm.generate(" w3", _params(), use_tqdm=False)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_and_ends_without_a_row(temperature: float, device: str, short: Path, start: Any) -> None:
    """They can never be drawn, so there is nothing to forbid: no index error."""
    driver: Driver = start(short, device=device)
    assert set(driver.tokenizer.eos_token_ids) >= {1, 515}
    plain = driver.ask_one([3, 4], _params(temperature=temperature, seed=1))
    changes: list[dict[str, Any]] = [
        {"bad_words": (" w254",)},
        {"bad_words": (" w254", " w256", " w261")},
        {"min_tokens": 8, "ignore_eos": False},
    ]
    for change in changes:
        answer = driver.ask_one([3, 4], _params(temperature=temperature, seed=1, **change))
        if not temperature or "bad_words" in change:  # without </s> others are a little likelier
            assert answer.token_ids == plain.token_ids
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 8)


@pytest.mark.parametrize("rows", [509, 321, 65])
def test_odd_numbers_of_rows_equal_the_reference(
    rows: int, device: str, make_llama: Any, start: Any, oracle: Any
) -> None:
    folder = make_llama([], vocab_size=rows)
    driver: Driver = start(folder, device=device)
    ids = [rows - 1, 3, rows // 2, 7]
    answer = driver.ask_one(ids, _params(logprobs=3, prompt_logprobs=0))
    assert answer.token_ids == oracle(folder).greedy(ids, 8)
    expected = oracle(folder).logprobs(ids + answer.token_ids)
    for position, entry in enumerate(answer.logprobs, len(ids) - 1):
        for token, item in entry.items():
            assert abs(item.logprob - expected[position, token].item()) < 1e-4
    # masks come in words of 32 bits
    last = driver.ask_one(ids, _params(allowed_token_ids=(rows - 1,)))
    assert last.token_ids == [rows - 1] * 8
    penalized = driver.ask_one(ids, _params(repetition_penalty=1e6, max_tokens=20))
    assert len(set(penalized.token_ids)) == 20
