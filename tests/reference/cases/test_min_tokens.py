"""min_tokens counts output tokens alone, holds for end tokens and stop strings, and is exact (case S-03)."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import EOS

from hardpoint import SamplingParams
from hardpoint.errors import RequestError

pytestmark = pytest.mark.reference

#: Wins over every other token.
FORCE_END = {EOS: 100.0}


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | changes))


@pytest.mark.parametrize("length", [1, 2, 16, 60])
@pytest.mark.parametrize("least", [0, 1, 4, 17])
def test_the_end_comes_at_index_min_tokens(
    least: int, length: int, overlap: bool, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    driver = start(tiny, device=device, overlap=overlap)
    answer = driver.ask_one(prompt_of(length), _params(min_tokens=least, logit_bias=FORCE_END))
    assert answer.token_ids.index(EOS) == least
    assert (len(answer.token_ids), answer.finish_reason) == (least + 1, "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_holds_for_chunks_seeds_and_neighbours(
    temperature: float, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    driver = start(tiny, device=device, budget=16)
    cases = [(least, length) for least in (0, 1, 4, 9) for length in (3, 40)]
    params = [_params(min_tokens=n, logit_bias=FORCE_END, temperature=temperature, seed=n) for n, _ in cases]
    answers = [driver.submit(prompt_of(c[1]), p)[0] for c, p in zip(cases, params, strict=True)]
    driver.run()
    assert [answer.token_ids.index(EOS) for answer in answers] == [least for least, _ in cases]


def test_stop_token_ids_wait_too(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device)
    params = _params(min_tokens=4, logit_bias={77: 100.0}, stop_token_ids=(77,))
    answer = driver.ask_one(prompt_of(9), params)
    assert (answer.token_ids.index(77), answer.stop_reason) == (4, 77)
    # an ignored end of sequence may be drawn at any time
    ignoring = driver.ask_one(prompt_of(9), _params(min_tokens=4, logit_bias=FORCE_END, ignore_eos=True, max_tokens=6))
    assert (ignoring.token_ids, ignoring.finish_reason) == ([EOS] * 6, "length")


def test_stop_strings_are_looked_for_once_enough_tokens_exist(device: str, make_chain: Any, start: Any) -> None:
    chain = make_chain(["go", "a", "xy", "b!", "ac", "zz", "a-"])
    driver = start(chain.folder, device=device)

    def text(**changes: Any) -> tuple[str, int | str | None]:
        answer = driver.ask_one(chain.ids[:1], _params(**changes))
        return answer.text, answer.stop_reason

    assert text(stop=("a",)) == ("", "a")
    assert text(stop=("a",), min_tokens=1) == ("", "a")
    assert text(stop=("a",), min_tokens=2) == ("axyb!", "a")  # "ac" is token 4
    assert text(stop=("a",), min_tokens=4) == ("axyb!", "a")
    assert text(stop=("a",), min_tokens=5) == ("axyb!aczz", "a")
    # one that began before the limit and ends at it counts
    assert text(stop=("!ac",), min_tokens=4) == ("axyb", "!ac")
    assert text(stop=("!ac",), min_tokens=5) == ("axyb!aczza-", None)


def test_more_than_max_tokens_is_refused(device: str, tiny: Any, start: Any, prompt_of: Any) -> None:
    driver = start(tiny, device=device)
    with pytest.raises(RequestError) as caught:
        driver.submit(prompt_of(3), _params(min_tokens=9, max_tokens=5))
    assert caught.value.field == "min_tokens"
    answer = driver.ask_one(prompt_of(3), _params(min_tokens=5, max_tokens=5, logit_bias=FORCE_END))
    assert (len(answer.token_ids), answer.finish_reason) == (5, "length")
    # without max_tokens the context ends it, whatever min_tokens says
    endless = driver.ask_one(prompt_of(500), _params(min_tokens=2**40, max_tokens=None, logit_bias=FORCE_END))
    assert (len(endless.token_ids), endless.finish_reason) == (12, "length")
