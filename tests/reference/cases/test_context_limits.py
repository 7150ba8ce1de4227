"""What fits the context but not the KV pool, or not a step's budget, ends; nothing waits for ever (case S-08)."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import assert_same

from hardpoint import LLM, SamplingParams
from hardpoint.errors import PromptTooLong

pytestmark = pytest.mark.reference


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | changes))


def test_more_than_the_pool_holds(overlap: bool, device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    """Context 512, pool of 20 x 16 = 320 tokens, step budget 64."""
    roomy = start(tiny, device=device)
    driver = start(tiny, device=device, overlap=overlap, pages=20, budget=64)
    shorts = [prompt_of(10 + number) for number in range(5)]
    alone = [roomy.ask_one(ids, _params()) for ids in shorts]
    whole = roomy.ask_one(prompt_of(300), _params(max_tokens=100))
    (refused,) = driver.submit(prompt_of(400), _params())
    (long,) = driver.submit(prompt_of(300), _params(max_tokens=100))
    answers = [driver.submit(ids, _params())[0] for ids in shorts]
    driver.run()
    assert (refused.finish_reason, refused.error_kind) == ("error", "PromptTooLong")
    assert "400 tokens" in (refused.error or "")
    assert "320" in (refused.error or "")
    # the last token drawn needs no place in the cache
    assert (long.finish_reason, len(long.token_ids)) == ("length", 21)
    assert long.token_ids == whole.token_ids[:21]
    for got, wanted in zip(answers, alone, strict=True):
        assert_same(got, wanted)
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


@pytest.mark.parametrize("length", [319, 320, 321])
def test_the_border_of_the_pool(length: int, device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device, pages=20, budget=64)
    (answer,) = driver.submit(prompt_of(length), _params())
    driver.run()
    if length > 320:
        assert answer.error_kind == "PromptTooLong"
    else:
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 321 - length)


@pytest.mark.parametrize("length", [510, 511])
def test_the_border_of_the_context(length: int, device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device)
    for wish in (None, 100):
        answer = driver.ask_one(prompt_of(length), _params(max_tokens=wish))
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 512 - length)
    with pytest.raises(PromptTooLong):
        driver.submit(prompt_of(512), _params())


def test_two_that_fit_alone_but_not_together(overlap: bool, device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    roomy = start(tiny, device=device)
    driver = start(tiny, device=device, overlap=overlap, pages=20, budget=64)
    prompts = [prompt_of(120, seed) for seed in range(3)]
    wanted = [roomy.ask_one(ids, _params(max_tokens=60)) for ids in prompts]
    answers = [driver.submit(ids, _params(max_tokens=60))[0] for ids in prompts]
    driver.run()
    for got, solo in zip(answers, wanted, strict=True):
        assert_same(got, solo)


def test_prompts_larger_than_a_step_without_chunking(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    """(d): refused at once, never parked; those that fit are served beside it."""
    driver = start(tiny, device=device, pages=20, budget=64, chunked_prefill=False)
    (large,) = driver.submit(prompt_of(100), _params())
    fitting = [driver.submit(prompt_of(length), _params())[0] for length in (64, 3, 50, 63)]
    driver.run()
    assert (large.finish_reason, large.error_kind) == ("error", "PromptTooLong")
    assert "chunked prefill is off" in (large.error or "")
    assert [answer.finish_reason for answer in fitting] == ["length"] * 4
    # growing past the budget is no reason to get stuck, even when preempted there
    grown = [driver.submit(prompt_of(60, seed), _params(max_tokens=100))[0] for seed in range(3)]
    driver.run()
    assert [len(answer.token_ids) for answer in grown] == [100] * 3
    assert sum(answer.preemptions for answer in grown) > 0


def test_the_offline_interface_raises_and_goes_on(tiny: Any, prompt_of: Any) -> None:
    with LLM(str(tiny), device="reference", dtype="float32", num_kv_pages=20, max_batch_tokens=64) as llm:
        with pytest.raises(PromptTooLong):
            llm.generate([prompt_of(5), prompt_of(400), prompt_of(6)], _params(), use_tqdm=False)
        outputs = llm.generate([prompt_of(5), prompt_of(320), prompt_of(6)], _params(), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 1, 8]
