"""A request that loses its pages and computes them again gives the same answer as alone (case S-23)."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import Answer, Driver, assert_same

from hardpoint import SamplingParams

pytestmark = pytest.mark.reference


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 44, "min_tokens": 30} | changes))


KINDS: dict[str, SamplingParams] = {
    "greedy": _params(),
    "seeded": _params(temperature=1.0, seed=7, logprobs=2),
    "repetition": _params(repetition_penalty=1.5, logprobs=2),
    "presence": _params(presence_penalty=1.7, frequency_penalty=0.4, temperature=0.8, seed=3),
    "n": _params(n=2, temperature=1.0, seed=11, logprobs=1),
    "stop": _params(stop=(" w3", " w17", "9 w"), temperature=1.0, seed=5, min_tokens=30),
    "scored": _params(prompt_logprobs=2, logprobs=2, temperature=0.7, top_p=0.9, seed=1),
    "biased": _params(logit_bias={5: 4.0}, bad_words=(" w20",), allowed_token_ids=tuple(range(100)), min_tokens=0),
}
SETTINGS: list[dict[str, Any]] = [
    {"overlap": True},
    {"overlap": False},
    {"prefix_caching": False},
    {"budget": 24},
    {"page_tokens": 16, "pages": 7, "budget": 33},
    {"policy": "priority"},
]


@pytest.fixture(scope="module")
def solo(device: str, tiny: Any, start: Any, prompt_of: Any) -> dict[str, list[Answer]]:
    """Each kind alone, with room."""
    driver: Driver = start(tiny, device=device)
    answers = {
        kind: driver.cold().ask(prompt_of(20, seed), params) for seed, (kind, params) in enumerate(KINDS.items())
    }
    assert not any(answer.preemptions for several in answers.values() for answer in several)
    return answers


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_crowded_equals_solo(
    settings: dict[str, Any], solo: dict[str, list[Answer]], device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    driver = start(tiny, device=device, **({"pages": 12, "page_tokens": 8} | settings))
    crowded = {
        kind: driver.submit(prompt_of(20, seed), params, priority=seed % 3)
        for seed, (kind, params) in enumerate(KINDS.items())
    }
    last, idle = -1, 0
    while driver.engine.has_work:
        driver.step()
        generated = driver.engine.stats().generated_tokens
        idle = idle + 1 if generated == last else 0
        last = generated
        assert idle < 8, "no token for several steps: a livelock"
    for kind, answers in crowded.items():
        for got, wanted in zip(answers, solo[kind], strict=True):
            assert_same(got, wanted)
    lost = [answer.preemptions for answers in crowded.values() for answer in answers]
    assert max(lost) >= (1 if "page_tokens" in settings else 2)
    assert driver.engine.stats().preemptions >= sum(lost)
    assert driver.used_pages == 0


def test_streams_have_no_gap_and_no_repeat(device: str, make_chain: Any, start: Any) -> None:
    """A chain of pieces whose right continuation is known at each token, characters cut over tokens among them."""
    script = ["go", *(f" p{number}" for number in range(45)), "日", b"\xf0", b"\x9f", b"\xa6", b"\x9c", "end"]
    chain = make_chain(script, end="go")
    driver = start(chain.folder, device=device, pages=12, page_tokens=8, budget=16)
    text = "".join(f" p{number}" for number in range(45)) + "日🦜end"
    params = SamplingParams(temperature=0.0, max_tokens=51)
    answers = [driver.submit(chain.ids[:1], params)[0] for _ in range(8)]
    driver.run()
    assert max(answer.preemptions for answer in answers) >= 1
    for answer in answers:
        assert answer.text == text
        assert answer.token_ids == chain.ids[1:]
        assert not any("\ufffd" in piece for piece in answer.pieces)


def test_sequences_of_one_request_when_their_first_is_preempted(
    overlap: bool, device: str, tiny: Any, start: Any, prompt_of: Any
) -> None:
    """The first sequence, whose prompt pages the others want, loses them before the others start."""
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=25, ignore_eos=True)
    many = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=25, ignore_eos=True, logprobs=1)
    roomy = start(tiny, device=device)
    solo = roomy.ask(prompt_of(70), many)
    urgent_solo = roomy.ask_one(prompt_of(90), params)
    for steps in (1, 3, 7) if device == "strict" else (1, 2, 3, 4, 5, 7, 10):
        driver = start(
            tiny, device=device, overlap=overlap, pages=14, budget=24, policy="priority", prefix_caching=False
        )
        answers = driver.submit(prompt_of(70), many, priority=1)
        for _ in range(steps):
            driver.step()
        (urgent,) = driver.submit(prompt_of(90), params, priority=0)
        driver.run()
        assert_same(urgent, urgent_solo)
        for got, wanted in zip(answers, solo, strict=True):
            assert_same(got, wanted)
