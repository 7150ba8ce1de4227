"""Prompts that are cached in whole or in part give the cold result; salts keep tenants apart (case S-38)."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import assert_same

from hardpoint import SamplingParams

pytestmark = pytest.mark.reference


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 5, "logprobs": 3, "ignore_eos": True} | changes))


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48])
def test_whole_pages_leave_one_token_to_compute(
    length: int, count: int, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    ids, params = prompt_of(length), _params(max_tokens=count)
    cold = start(tiny, device=device, prefix_caching=False).ask_one(ids, params)
    assert cold.cached_tokens == 0
    driver = start(tiny, device=device)
    found = []
    for _ in range(3):
        answer = driver.ask_one(ids, params)
        assert_same(answer, cold)
        found.append(answer.cached_tokens)
    both = driver.submit(ids, params) + driver.submit(ids, params)
    driver.run()
    for answer in both:
        assert_same(answer, cold)
        found.append(answer.cached_tokens)
    assert found == [0, *[(length - 1) // 16 * 16] * 4]
    assert_same(driver.ask(ids, _params(max_tokens=count, n=3))[0], cold)


@pytest.mark.parametrize("length", [16, 17, 32, 48])
def test_the_same_prompt_twice_at_once_from_cold(
    length: int, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    ids = prompt_of(length)
    cold = start(tiny, device=device, prefix_caching=False).ask_one(ids, _params())
    driver = start(tiny, device=device)
    answers = [driver.submit(ids, _params())[0] for _ in range(3)] + driver.ask(ids, _params(n=3))[:1]
    for answer in answers:
        assert_same(answer, cold)


@pytest.mark.parametrize("length", [16, 33])
def test_a_preempted_request_finds_its_own_pages(
    length: int, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    """It comes back with its whole prompt cached, and more: output pages are cached too."""
    ids, params = prompt_of(length), _params(max_tokens=24)
    cold = start(tiny, device=device, prefix_caching=False).ask_one(ids, params)
    driver = start(tiny, device=device, pages=8, policy="priority")
    for steps in (1, 2, 18):
        driver.cold()
        (answer,) = driver.submit(ids, params, priority=1)
        for _ in range(steps):
            driver.step()
        (urgent,) = driver.submit(prompt_of(100), _params(max_tokens=4), priority=0)
        driver.run()
        assert_same(answer, cold)
        assert answer.cached_tokens == 0  # what it found when it first ran
        assert urgent.finish_reason == "length"
        assert answer.preemptions == 1


def test_shared_beginnings(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    """A conversation that grows, and one that turns off in the middle of a page."""
    plain, driver = start(tiny, device=device, prefix_caching=False), start(tiny, device=device)
    history, before = prompt_of(20), 0
    for turn in range(4):
        wanted = plain.ask_one(history, _params(max_tokens=12))
        answer = driver.ask_one(history, _params(max_tokens=12))
        assert_same(answer, wanted)
        # all full pages of the turn before, of which the last token drawn was never computed
        assert answer.cached_tokens == before // 16 * 16
        before = len(history) + 11
        history = [*history, *answer.token_ids, *prompt_of(7, turn)]
    for cut in (3, 16, 30, 47):
        branch = history[:cut] + prompt_of(30, 9)
        answer = driver.ask_one(branch, _params())
        assert_same(answer, plain.ask_one(branch, _params()))
        assert answer.cached_tokens == cut // 16 * 16


def test_pages_that_were_given_away_are_not_found(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    """A pool too small for all prefixes: the oldest go, and their prompts are computed again."""
    plain, driver = start(tiny, device=device, prefix_caching=False), start(tiny, device=device, pages=12)
    prompts = [prompt_of(64, seed) for seed in range(6)]
    wanted = [plain.ask_one(ids, _params()) for ids in prompts]
    found = 0
    for _ in range(3):
        for ids, cold in zip([*prompts, prompts[-1]], [*wanted, wanted[-1]], strict=True):
            answer = driver.ask_one(ids, _params())
            assert_same(answer, cold)
            found += answer.cached_tokens or 0
    assert found >= 3 * 48
    assert driver.used_pages == 0


def test_salts_isolate(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver, ids = start(tiny, device=device), prompt_of(50)
    cold = driver.ask_one(ids, _params(), cache_salt="one")
    found = [driver.ask_one(ids, _params(), cache_salt=salt) for salt in ("one", "two", "", "one", "two", "")]
    for answer in found:
        assert_same(answer, cold)
    assert [answer.cached_tokens for answer in found] == [48, 0, 0, 48, 48, 48]
    # a salt that looks like another's spelling is another
    assert driver.ask_one(ids, _params(), cache_salt="one ").cached_tokens == 0


def test_reset_forgets(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver, ids = start(tiny, device=device), prompt_of(50)
    cold = driver.ask_one(ids, _params())
    driver.engine.reset_prefix_cache()
    assert driver.engine.stats().pages_cached == 0
    again = driver.ask_one(ids, _params())
    assert again.cached_tokens == 0
    assert_same(again, cold)
    # also while a request runs on such pages
    (running,) = driver.submit(ids, _params(max_tokens=30))
    driver.step()
    driver.step()
    driver.engine.reset_prefix_cache()
    other = driver.ask_one(ids, _params())
    assert other.cached_tokens == 0
    assert running.token_ids[:5] == cold.token_ids
