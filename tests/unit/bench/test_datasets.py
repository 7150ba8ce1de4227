"""Prompts of the load generator."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.bench.datasets import FIRST_ID, PromptSettings, prompts
from hardpoint.errors import ConfigError


def test_lengths_are_exact_and_seeds_repeat() -> None:
    settings = PromptSettings(input_len=20, vocab_size=1000, seed=3)
    first = prompts(settings, 5)
    assert [len(prompt) for prompt in first] == [20] * 5
    assert all(isinstance(prompt, list) and min(prompt) >= FIRST_ID and max(prompt) < 1000 for prompt in first)
    assert first == prompts(settings, 5)
    assert first != prompts(PromptSettings(input_len=20, vocab_size=1000, seed=4), 5)


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    made = prompts(PromptSettings(input_len=20, shared_prefix=8), 4)
    assert len({tuple(prompt[:8]) for prompt in made}) == 1
    assert len({tuple(prompt[8:]) for prompt in made}) == 4


def test_spread() -> None:
    lengths = {len(prompt) for prompt in prompts(PromptSettings(input_len=100, spread=0.5), 200)}
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(lengths) > 20


def test_files(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n", encoding="utf-8")
    assert prompts(PromptSettings(file=text), 3) == ["one", "two", "one"]
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a"}\n', encoding="utf-8")
    assert prompts(PromptSettings(file=lines), 1) == ["a"]
    lines.write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        prompts(PromptSettings(file=lines), 1)
    with pytest.raises(ConfigError, match=r"no\.txt"):
        prompts(PromptSettings(file=tmp_path / "no.txt"), 1)


@pytest.mark.parametrize(
    "settings", [PromptSettings(vocab_size=FIRST_ID), PromptSettings(input_len=4, shared_prefix=5)]
)
def test_impossible_settings(settings: PromptSettings) -> None:
    with pytest.raises(ConfigError):
        prompts(settings, 1)
