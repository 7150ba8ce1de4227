"""Seeds, several sequences per request, and what they share (case S-05)."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import assert_same

from hardpoint import SamplingParams
from hardpoint.errors import RequestError

pytestmark = pytest.mark.reference


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 24, "ignore_eos": True} | changes))


def _ids(answers: Any) -> list[tuple[int, ...]]:
    return [tuple(answer.token_ids) for answer in answers]


def test_a_seed_repeats_alone_and_under_load(overlap: bool, device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver, ids = start(tiny, device=device, overlap=overlap), prompt_of(21)
    first = driver.ask(ids, _params(seed=1234, n=3))
    assert len(set(_ids(first))) == 3
    assert _ids(driver.ask(ids, _params(seed=1234, n=3))) == _ids(first)
    crowd, noise = [], []
    for number in range(8):
        crowd.append(driver.submit(ids, _params(seed=1234, n=3)))
        noise += driver.submit(prompt_of(10 + number), _params())
    driver.run()
    for answers in crowd:
        for got, wanted in zip(answers, first, strict=True):
            assert_same(got, wanted)
    assert len(set(_ids(noise))) == 8


def test_many_sequences_of_one_token(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device)
    answers = driver.ask(prompt_of(21), _params(n=64, max_tokens=1, temperature=2.0, seed=3))
    assert [len(answer.token_ids) for answer in answers] == [1] * 64
    assert all(answer.finish_reason == "length" for answer in answers)
    assert len(set(_ids(answers))) > 10
    # more sequences than rows: they take turns
    assert len(driver.ask(prompt_of(21), _params(n=100, max_tokens=2))) == 100


def test_seeds_differ_and_zero_is_one(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver, ids = start(tiny, device=device), prompt_of(21)

    def draw(seed: int | None, n: int = 1) -> tuple[tuple[int, ...], ...]:
        return tuple(_ids(driver.ask(ids, _params(seed=seed, n=n))))

    seeds = [0, 1, 1234, 1235, -2, 2**63 - 1, -(2**63)]
    drawn = {seed: draw(seed) for seed in seeds}
    assert len(set(drawn.values())) == len(seeds)
    assert draw(0) == drawn[0]
    # without a seed, or with -1, every request gets a seed of its own
    assert len({draw(None), draw(None), draw(-1), draw(-1)}) == 4
    # no sequence of one seed is a sequence of a neighbouring seed
    assert not set(draw(7, n=4)) & set(draw(8, n=4))
    assert draw(7) == draw(7, n=4)[:1]


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**70])
def test_seeds_out_of_range_are_refused(seed: int, device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device)
    with pytest.raises(RequestError) as caught:
        driver.submit(prompt_of(3), _params(seed=seed))
    assert caught.value.field == "seed"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_sequences_share_the_prompts_pages(
    prefix_caching: bool, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    """Page use is about prompt + n x output, not n x (prompt + output)."""
    driver = start(tiny, device=device, prefix_caching=prefix_caching)
    length, n, count = 160, 8, 20
    driver.submit(prompt_of(length), _params(n=n, max_tokens=count, seed=1))
    most = 0
    while driver.engine.has_work:
        driver.step()
        most = max(most, driver.used_pages)
    # 9 full pages before the prompt's last token are shared; each sequence has the rest for itself
    shared, own = 9, -(-(length + count) // 16) - 9
    assert most <= shared + n * own
    assert most > own * n  # they did run at the same time
    assert driver.used_pages == 0
    solo = driver.ask(prompt_of(length), _params(max_tokens=count, seed=1))
    driver.cold()
    answers = driver.ask(prompt_of(length), _params(n=n, max_tokens=count, seed=1))
    assert_same(answers[0], solo[0])


def test_siblings_are_not_touched_by_a_stop(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    """The first sequence, whose prompt pages all use, ends early; the others go on undisturbed."""
    driver, ids = start(tiny, device=device), prompt_of(40)
    free = driver.ask(ids, _params(n=4, seed=5))
    stop = free[0].token_ids[1]
    stopped = driver.cold().ask(ids, _params(n=4, seed=5, stop_token_ids=(stop,)))
    for got, wanted in zip(stopped, free, strict=True):
        cut = wanted.token_ids.index(stop) + 1 if stop in wanted.token_ids else 24
        assert got.token_ids == wanted.token_ids[:cut]
    assert len(stopped[0].token_ids) <= 2
