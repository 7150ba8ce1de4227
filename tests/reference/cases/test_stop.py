"""Stop strings that begin or end within a token, and a stop that the very first token completes (cases S-02, S-33)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_driver import Driver, assert_same
from tiny_models import EOS

from hardpoint import LLM, SamplingParams

pytestmark = pytest.mark.reference

START = "go"
SCRIPT = [START, " 7", " 8", " 9", "foo", "bar!baz"]
#: stop strings, whether they stay, text, tokens generated, the stop that is reported
CASES = [
    (("8 9f",), False, " 7 ", 4, "8 9f"),
    (("bar!",), False, " 7 8 9foo", 5, "bar!"),
    (("bar!",), True, " 7 8 9foobar!", 5, "bar!"),
    (("obar",), False, " 7 8 9fo", 5, "obar"),
    (("9foo", "foob"), False, " 7 8 ", 4, "9foo"),
    (("foob", "9foo"), True, " 7 8 9foo", 4, "9foo"),
    ((" 7",), False, "", 1, " 7"),
    (("r!b", "baz", "z"), False, " 7 8 9fooba", 5, "r!b"),
    (("9foo", "foo", "o"), False, " 7 8 9f", 4, "o"),
    (("9foo", "foo"), False, " 7 8 ", 4, "9foo"),
    (("foo", "8 9foo", "oo"), False, " 7 ", 4, "8 9foo"),
    (("absent", "7 9"), False, " 7 8 9foobar!baz", 6, None),
    (("bazz", "zz"), True, " 7 8 9foobar!baz", 6, None),
]


@pytest.fixture(scope="module")
def chain(make_chain: Any) -> Any:
    return make_chain(SCRIPT)


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | changes))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "|".join(case[0]) + ("+" if case[1] else ""))
def test_stop_strings_over_token_borders(case: Any, overlap: bool, device: str, chain: Any, start: Any) -> None:
    stops, keep, text, tokens, reported = case
    driver = start(chain.folder, device=device, overlap=overlap)
    answer = driver.ask_one(chain.ids[:1], _params(stop=stops, include_stop_str_in_output=keep))
    assert answer.text == text
    assert answer.token_ids == [*chain.ids[1:], EOS][:tokens]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", reported)
    assert driver.used_pages == 0


def test_whole_and_streamed_text_agree(device: str, chain: Any, start: Any) -> None:
    driver = start(chain.folder, device=device)
    with LLM(str(chain.folder), device=device, dtype="float32", num_kv_pages=64) as llm:
        params = [_params(stop=case[0], include_stop_str_in_output=case[1]) for case in CASES]
        wholes = llm.generate([chain.ids[:1]] * len(CASES), params, use_tqdm=False)
    for own, whole in zip(params, wholes, strict=True):
        streamed = driver.ask_one(chain.ids[:1], own)
        (output,) = whole.outputs
        assert (output.text, output.token_ids) == (streamed.text, streamed.token_ids)
        assert (output.finish_reason, output.stop_reason) == (streamed.finish_reason, streamed.stop_reason)


def _naive(text: str, stops: tuple[str, ...], keep: bool) -> tuple[str, str | None]:
    """The match that ends first wins; of several that end together, the longest."""
    found = [(end, -len(stop), stop) for stop in stops for end in [text.find(stop) + len(stop)] if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if keep else end - len(stop)], stop


#: Characters that are spread over tokens, repeats, and pieces that begin like others end.
RICH = [
    START, "ab", "aba", "abac", "é", b"\xf0", b"\x9f", b"\xa6", b"\x9c", " aba b", "bab", "a a", "\n\n", "ba\n", "日",
    "本語", "aab", b"\xe2", b"\x82", b"\xac", "ab ab ab", "c", "aa", "ca",
]  # fmt: skip


@pytest.mark.parametrize("include", [False, True])
def test_random_stops_against_a_plain_search(include: bool, device: str, make_chain: Any, start: Any) -> None:
    chain = make_chain(RICH)
    text = "ababaabacé🦜 aba bbaba a\n\nba\n日本語aab€ab ab abcaaca"
    driver = start(chain.folder, device=device)
    assert driver.ask_one(chain.ids[:1], _params(max_tokens=40)).text == text
    draw = random.Random(5)
    wanted, answers = [], []
    for number in range(40):
        stops = set()
        for _ in range(draw.randint(1, 3)):
            begin = draw.randrange(len(text) if number % 2 else 8)  # its beginning repeats itself most
            stop = text[begin : begin + draw.randint(1, 6)]
            stops.add(stop if draw.random() < 0.7 else stop[:-1] + draw.choice("abc 🦜é"))
        ordered = tuple(sorted(stops))
        wanted.append((ordered, _naive(text, ordered, include)))
        answers += driver.submit(
            chain.ids[:1], _params(stop=ordered, include_stop_str_in_output=include, max_tokens=40)
        )
    driver.run()
    for (stops, (shown, reported)), answer in zip(wanted, answers, strict=True):
        assert (answer.text, answer.stop_reason) == (shown, reported), stops


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_the_first_token_completes_a_stop(logprobs: int | None, device: str, chain: Any, start: Any) -> None:
    """S-33."""
    driver = start(chain.folder, device=device)
    newline = driver.tokenizer.encode("\n")
    assert len(newline) == 1
    params = _params(stop=("\n",), logprobs=logprobs, logit_bias={newline[0]: 100.0})
    before = driver.ask_one(chain.ids[:1], _params())
    answer = driver.ask_one(chain.ids[:1], params)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", "\n")
    assert answer.token_ids == newline
    assert len(answer.logprobs) == (0 if logprobs is None else 1)
    if logprobs is not None:
        assert len(answer.logprobs[0]) == 1 + logprobs
    assert_same(driver.ask_one(chain.ids[:1], _params()), before)
    with LLM(str(chain.folder), device=device, dtype="float32", num_kv_pages=64) as llm:
        (whole,) = llm.generate([chain.ids[:1]], params, use_tqdm=False)
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == ("", "stop")
    assert len(whole.outputs[0].logprobs or []) == len(answer.logprobs)


@pytest.mark.parametrize("keep", [False, True])
def test_stop_tokens(keep: bool, device: str, chain: Any, start: Any) -> None:
    """The stop token is among the ids; its text is shown only where asked."""
    driver = start(chain.folder, device=device)
    params = _params(stop_token_ids=(chain.id(" 9"),), include_stop_str_in_output=keep)
    answer = driver.ask_one(chain.ids[:1], params)
    assert answer.token_ids == chain.ids[1:4]
    assert answer.text == (" 7 8 9" if keep else " 7 8")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", chain.id(" 9"))
    ended = driver.ask_one(chain.ids[:1], _params())
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (" 7 8 9foobar!baz", "stop", None)
    onward = driver.ask_one(chain.ids[:1], _params(ignore_eos=True, max_tokens=9))
    assert (onward.token_ids[5], onward.finish_reason, len(onward.token_ids)) == (EOS, "length", 9)


def test_a_stop_string_frees_the_request_at_once(device: str, make_chain: Any, start: Any) -> None:
    """The engine does not run on to max_tokens once the front end has found the stop."""
    chain = make_chain(["a", "b", "c"], end="a")
    driver: Driver = start(chain.folder, device=device)
    driver.submit(chain.ids[:1], _params(stop=("ca",), max_tokens=400))
    driver.steps = 0
    driver.run()
    assert driver.steps < 12
    assert driver.engine.stats().running == driver.used_pages == 0
