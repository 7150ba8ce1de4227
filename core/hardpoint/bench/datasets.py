"""Prompts to measure with: random token ids of exact length, or lines of a text file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hardpoint.errors import ConfigError

#: Ids below this are special tokens in most vocabularies.
FIRST_ID = 256

Prompt = str | list[int]


@dataclass(frozen=True)
class PromptSettings:
    """What prompts look like.

    Attributes:
        input_len: tokens of each prompt.
        shared_prefix: tokens at the front that all prompts have in common (prefix cache).
        spread: lengths are drawn from input_len * [1 - spread, 1 + spread].
        vocab_size: ids are drawn below it.
        seed: same seed, same prompts.
        file: lines of text, or JSON lines with a "prompt"; goes before the rest.
    """

    input_len: int = 128
    shared_prefix: int = 0
    spread: float = 0.0
    vocab_size: int = 16_000
    seed: int = 0
    file: Path | None = None


def prompts(settings: PromptSettings, count: int) -> list[Prompt]:
    """`count` prompts; a file with fewer lines is gone through again. Raises ConfigError."""
    if settings.file is not None:
        lines = read_prompts(settings.file)
        return [lines[index % len(lines)] for index in range(count)]
    if settings.vocab_size <= FIRST_ID:
        raise ConfigError(f"--vocab-size must be above {FIRST_ID}")
    if settings.shared_prefix > settings.input_len:
        raise ConfigError(f"--shared-prefix {settings.shared_prefix} is longer than --input-len {settings.input_len}")
    draw = random.Random(settings.seed)
    ids = range(FIRST_ID, settings.vocab_size)
    prefix = draw.choices(ids, k=settings.shared_prefix)
    return [prefix + draw.choices(ids, k=_length(settings, draw) - len(prefix)) for _ in range(count)]


def _length(settings: PromptSettings, draw: random.Random) -> int:
    low = round(settings.input_len * (1 - settings.spread))
    high = round(settings.input_len * (1 + settings.spread))
    return max(draw.randint(low, high), settings.shared_prefix, 1)


def read_prompts(path: Path) -> Sequence[str]:
    """The prompts of a text or JSON-lines file. Raises ConfigError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts {path}: no prompt in it")
    if path.suffix != ".jsonl":
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(str(json.loads(line)["prompt"]))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f'--prompts {path}, line {number}: no JSON object with a "prompt"') from None
    return found
