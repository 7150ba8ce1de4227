"""Scoring a prompt with and without output, and log-probabilities of the output (case S-04, the engine's part)."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import RequestError

pytestmark = pytest.mark.reference


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 3} | changes))


def _check_positions(entries: Any, ids: list[int], expected: Any, wanted: int, texts: Any) -> None:
    """entries[i] is about ids[i]; expected: the oracle's rows for the same positions."""
    for entry, token, row in zip(entries, ids, expected, strict=True):
        assert next(iter(entry)) == token
        assert abs(entry[token].logprob - row[token].item()) < 1e-4
        assert entry[token].rank == int((row > row[token]).sum()) + 1
        assert wanted <= len(entry) <= wanted + 1
        best = row.topk(wanted).indices.tolist()
        assert set(entry) == {token, *best}
        for rank, other in enumerate(best, 1):
            assert abs(entry[other].logprob - row[other].item()) < 1e-4
            assert entry[other].rank == rank
        assert all(item.decoded_token == texts(other) for other, item in entry.items())


@pytest.mark.parametrize("wanted", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 4, 17])
@pytest.mark.parametrize("count", [0, 3])
def test_prompts_are_scored_as_transformers_does(
    count: int, length: int, wanted: int, device: str, tiny: Any, start: Any, oracle: Any, prompt_of: Any
) -> None:
    driver, ids = start(tiny, device=device), prompt_of(length)
    logprobs = oracle(tiny).logprobs(ids)
    answer = driver.ask_one(ids, _params(max_tokens=count, prompt_logprobs=wanted, logprobs=wanted))
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == length
    assert answer.prompt_logprobs[0] is None
    texts = lambda token: driver.tokenizer.decode([token], skip_special_tokens=False)  # noqa: E731
    _check_positions(answer.prompt_logprobs[1:], ids[1:], logprobs[:-1], wanted, texts)
    assert len(answer.token_ids) == len(answer.logprobs) == count
    assert answer.finish_reason == "length"
    if count:
        whole = oracle(tiny).logprobs(ids + answer.token_ids)
        assert answer.token_ids == oracle(tiny).greedy(ids, count)
        _check_positions(answer.logprobs, answer.token_ids, whole[length - 1 : -1], wanted, texts)


def test_scoring_a_full_context(device: str, tiny: Any, start: Any, oracle: Any, prompt_of: Any) -> None:
    """A prompt as long as the context leaves no room for output, and may still be scored."""
    driver, ids = start(tiny, device=device), prompt_of(512)
    answer = driver.ask_one(ids, _params(max_tokens=0, prompt_logprobs=0))
    expected = oracle(tiny).logprobs(ids)
    assert len(answer.prompt_logprobs or ()) == 512
    for position in (1, 255, 511):
        (entry,) = (answer.prompt_logprobs or [])[position].values()
        assert abs(entry.logprob - expected[position - 1, ids[position]].item()) < 1e-4
    with pytest.raises(RequestError):
        driver.submit(ids, _params(max_tokens=1, prompt_logprobs=0))


def test_no_tokens_means_scoring(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device)
    with pytest.raises(RequestError) as caught:
        driver.submit(prompt_of(4), _params(max_tokens=0))
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize("count", [0, 3])
def test_several_sequences_score_once(count: int, device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver, ids = start(tiny, device=device), prompt_of(20)
    answers = driver.ask(ids, _params(n=3, max_tokens=count, prompt_logprobs=1))
    assert [len(answer.token_ids) for answer in answers] == [count] * 3
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    assert [len(answer.prompt_logprobs or ()) for answer in answers] == [20, 0, 0]
    assert driver.used_pages == 0


def test_offline_results_have_the_same_shape(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    ids = prompt_of(4)
    with LLM(str(tiny), device=device, dtype="float32", num_kv_pages=64) as llm:
        (only,) = llm.generate([ids], _params(max_tokens=0, prompt_logprobs=1, logprobs=1), use_tqdm=False)
        (with_output,) = llm.generate([ids], _params(prompt_logprobs=1, logprobs=1), use_tqdm=False)
    assert len(only.prompt_logprobs or ()) == len(with_output.prompt_logprobs or ()) == 4
    assert (only.outputs[0].token_ids, only.outputs[0].text, only.outputs[0].logprobs) == ([], "", [])
    assert only.outputs[0].finish_reason == "length"
    assert len(with_output.outputs[0].logprobs or ()) == 3
    (output,) = with_output.outputs
    total = sum(entry[token].logprob for entry, token in zip(output.logprobs or (), output.token_ids, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)
