"""Incremental text equals one-shot text, whatever the cuts (cases S-01, S-32)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_tokenizers import PHRASES, Scripted, byte_level, sentencepiece_like

from hardpoint.frontend.detokenizer import MAX_PENDING, REPLACEMENT, Detokenizer
from hardpoint.request.sampling import SamplingParams

PARAMS = SamplingParams()
BYTES = byte_level([("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("Ġ", "ð"), ("Ġð", "Ł"), ("æ", "Ĺ")])
TEXT = " ".join(PHRASES)
IDS = BYTES.encode(TEXT)


def stream(tokenizer: Scripted, prompt: list[int], output: list[int], sizes: list[int] | None = None) -> list[str]:
    """Pieces of text, for groups of the given sizes (default: one token each), and the flush."""
    detokenizer = Detokenizer(tokenizer, prompt, PARAMS)
    pieces, at = [], 0
    for size in sizes or [1] * len(output):
        pieces.append(detokenizer.push(output[at : at + size]))
        at += size
    return [*pieces, detokenizer.flush()]


def whole_prefix(prompt: list[int]) -> str:
    """The characters that the prompt holds whole."""
    return BYTES.decode(prompt).rstrip(REPLACEMENT)


def test_200_random_cuts_of_a_multilingual_text() -> None:
    rng = random.Random(7)
    for _ in range(200):
        cut = rng.randrange(len(IDS))
        prompt, output = IDS[:cut], IDS[cut:]
        pieces = stream(BYTES, prompt, output)
        # what stands before the cut is not repeated; the character at the cut may be given once
        assert "".join(pieces) == TEXT[len(whole_prefix(prompt)) :]
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_random_groups_of_tokens() -> None:
    rng = random.Random(8)
    for _ in range(100):
        sizes = []
        while sum(sizes) < len(IDS):
            sizes.append(rng.randint(1, 9))
        assert "".join(stream(BYTES, [], IDS, sizes)) == TEXT


def test_prompt_that_ends_inside_a_character() -> None:
    parrot = BYTES.encode("Hello 🦜")
    for missing in (1, 2, 3):
        prompt, output = parrot[:-missing], parrot[-missing:]
        if BYTES.decode(prompt).endswith(REPLACEMENT):
            assert "".join(stream(BYTES, prompt, output + BYTES.encode("!"))) == "🦜!"


def test_prompt_that_ends_inside_a_character_that_never_comes() -> None:
    parrot = BYTES.encode("Hello 🦜")
    text = "".join(stream(BYTES, parrot[:-1], BYTES.encode("abc")))
    assert text == "abc"


def test_mark_that_is_meant_stays_in_the_prompt() -> None:
    prompt = BYTES.encode(f"x{REPLACEMENT}")
    assert "".join(stream(BYTES, prompt, BYTES.encode("yz"))) == "yz"


def test_unfinished_character_at_the_end_is_one_mark() -> None:
    pieces = stream(BYTES, [], BYTES.encode("ok 🦜")[:-1])
    assert pieces[-1] == REPLACEMENT
    assert "".join(pieces) == f"ok {REPLACEMENT}"


@pytest.mark.parametrize("text", [REPLACEMENT * 200, "é" * 200 + REPLACEMENT * 50])
def test_long_run_of_marks_flows(text: str) -> None:
    ids = BYTES.encode(text)
    detokenizer = Detokenizer(BYTES, [], PARAMS)
    shown = ""
    for token in ids:
        shown += detokenizer.push([token])
        assert len(detokenizer._ids) <= 3 * MAX_PENDING
    assert shown + detokenizer.flush() == text


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=120), cut=st.integers(0, 120))
def test_any_bytes_equal_the_one_shot_decode(data: bytes, cut: int) -> None:
    alphabet = {c: i for i, c in enumerate(sorted(BYTES.raw.get_vocab(), key=BYTES.raw.token_to_id)) if len(c) == 1}
    from_byte = dict(zip(_byte_order(), sorted(alphabet), strict=True))
    ids = [alphabet[from_byte[byte]] for byte in data]
    assert "".join(stream(BYTES, [], ids)) == BYTES.decode(ids)
    prompt, output = ids[:cut], ids[cut:]
    if BYTES.decode(prompt) + BYTES.decode(output) == BYTES.decode(ids):
        assert "".join(stream(BYTES, prompt, output)) == BYTES.decode(output)


def _byte_order() -> list[int]:
    """Bytes in the order of their characters in the sorted byte-level alphabet."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in plain}
    for n, byte in enumerate(byte for byte in range(256) if byte not in names):
        names[byte] = chr(256 + n)
    return sorted(names, key=lambda byte: names[byte])


def test_special_tokens_are_skipped_or_shown() -> None:
    start, end = BYTES.encode("<|start|>")[0], BYTES.encode("<|end|>")[0]
    output = [start, *BYTES.encode("a b"), end, *BYTES.encode(" c")]
    assert "".join(stream(BYTES, [], output)) == "a b c"
    shown = Detokenizer(BYTES, [], SamplingParams(skip_special_tokens=False))
    assert "".join(shown.push([t]) for t in output) + shown.flush() == "<|start|>a b<|end|> c"


SPM = sentencepiece_like()
MARK, KETTLE, ON = (SPM.raw.token_to_id(p) for p in ("▁", "▁kettle", "▁on"))
BOS = SPM.raw.token_to_id("<s>")
PARROT = [SPM.raw.token_to_id(f"<0x{byte:02X}>") for byte in "🦜".encode()]


@pytest.mark.parametrize("prompt", [[], [BOS]])
def test_one_leading_space_goes_in_total(prompt: list[int]) -> None:
    assert "".join(stream(SPM, prompt, [MARK, KETTLE, ON])) == " kettle on"
    assert "".join(stream(SPM, prompt, [KETTLE, *PARROT, ON])) == "kettle🦜 on"


def test_space_within_a_sequence_stays() -> None:
    assert "".join(stream(SPM, [BOS, KETTLE, ON], [KETTLE, ON])) == " kettle on"
    assert "".join(stream(SPM, [ON, *[BOS] * 20], [KETTLE, ON])) == " kettle on"


def test_run_of_special_tokens_keeps_the_window_small_and_the_space() -> None:
    output = [KETTLE, *[BOS] * 50, ON]
    detokenizer = Detokenizer(SPM, [], PARAMS)
    text = ""
    for token in output:
        text += detokenizer.push([token])
        assert len(detokenizer._ids) <= 3 * MAX_PENDING
    assert text == "kettle on"


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.sampled_from([MARK, KETTLE, ON, BOS, -1]), max_size=25),
    cut=st.integers(0, 25),
    sizes=st.lists(st.integers(1, 4), min_size=60, max_size=60),
)
def test_spaces_equal_the_one_shot_decode(ids: list[int], cut: int, sizes: list[int]) -> None:
    """-1 stands for the four byte tokens of one character."""
    spread = [part for token in ids for part in (PARROT if token == -1 else [token])]
    prompt = [part for token in ids[:cut] for part in (PARROT if token == -1 else [token])]
    joined = "".join(stream(SPM, prompt, spread[len(prompt) :], sizes))
    assert joined == SPM.decode(spread)[len(SPM.decode(prompt)) :]
