"""Requests over time: read from a trace, or generated.

A trace is a CSV: arrival seconds, prompt tokens, output tokens, optionally a prefix id and how many tokens of the
prompt belong to that prefix. A header is optional; without one the columns stand in this order.

    arrival,prompt_tokens,output_tokens,prefix_id,prefix_tokens
    0.00,812,120,,
    0.35,900,64,system-a,512

Prompts with the same prefix id start with the same tokens: their first prefix_tokens, or all that the shorter has where
that is not given (turns of one conversation). Rows need not be sorted.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hardpoint.errors import ConfigError

COLUMNS = ("arrival", "prompt_tokens", "output_tokens", "prefix_id", "prefix_tokens")
#: Longest prompt and output of a trace: what an int32 token count can name with room to spare.
_MOST_TOKENS = 2**30


@dataclass(frozen=True)
class Traffic:
    """Requests by arrival.

    Attributes:
        arrival: float64 [N], seconds, ascending.
        prompt, output: int64 [N], tokens.
        prefix: int64 [N], number of the shared prefix, -1 for none.
        shared: int64 [N], tokens of the prompt that belong to it.
    """

    arrival: npt.NDArray[np.float64]
    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]
    prefix: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrival)

    def prompt_tokens(self, index: int) -> npt.NDArray[np.int32]:
        """int32 [prompt[index]]: token ids that no other request has, after those of the shared prefix."""
        tokens = np.full(int(self.prompt[index]), index, np.int32)
        shared = int(self.shared[index])
        if shared:
            tokens[:shared] = -1 - int(self.prefix[index])
        return tokens


@dataclass(frozen=True)
class Lengths:
    """Of generated requests.

    Attributes:
        prompt, output: mean tokens.
        spread: sigma of the log-normal distribution of both; 0 makes all alike.
        prefixes: shared prefixes, evenly drawn; 0 for none.
        prefix_tokens: of each, on top of `prompt`.
    """

    prompt: int = 512
    output: int = 128
    spread: float = 0.0
    prefixes: int = 0
    prefix_tokens: int = 0


def generate(rate: float, duration: float, lengths: Lengths, *, burst: float = 1.0, seed: int = 0) -> Traffic:
    """Requests that arrive for `duration` seconds, `rate` per second on average.

    burst: squared coefficient of variation of the gaps, which are gamma distributed: 1 is a Poisson process, above it
    arrivals come in bursts, 0 evenly. Raises ConfigError for what cannot be.
    """
    if not (math.isfinite(rate) and rate > 0 and math.isfinite(duration) and duration > 0):
        raise ConfigError(f"--rate {rate:g} and --duration {duration:g} must both be above 0")
    if not (math.isfinite(burst) and burst >= 0):
        raise ConfigError(f"--burst {burst:g} must be 0 or more")
    if rate * duration > 20e6:
        raise ConfigError(f"--rate {rate:g} for {duration:g} s is more than 20 million requests: too many to replay")
    random = np.random.default_rng(seed)
    arrival = _arrivals(random, rate, duration, burst)
    count = len(arrival)
    if not count:
        raise ConfigError(f"--rate {rate:g} for {duration:g} s brought no request; raise --duration")
    prompt = _sizes(random, lengths.prompt, lengths.spread, count)
    output = _sizes(random, lengths.output, lengths.spread, count)
    prefix = np.full(count, -1, np.int64)
    shared = np.zeros(count, np.int64)
    if lengths.prefixes and lengths.prefix_tokens:
        prefix = random.integers(0, lengths.prefixes, count)
        shared += lengths.prefix_tokens
    return Traffic(arrival, prompt + shared, output, prefix, shared)


def _arrivals(random: np.random.Generator, rate: float, duration: float, burst: float) -> npt.NDArray[np.float64]:
    """Drawn in blocks, so that a longer duration only adds to a shorter one."""
    pieces: list[npt.NDArray[np.float64]] = []
    last = 0.0
    while last < duration:
        gaps = np.full(1024, 1.0 / rate) if burst == 0 else random.gamma(1.0 / burst, burst / rate, 1024)
        pieces.append(last + np.cumsum(gaps))
        last = float(pieces[-1][-1])
    found = np.concatenate(pieces)
    return found[found < duration]


def _sizes(random: np.random.Generator, mean: int, spread: float, count: int) -> npt.NDArray[np.int64]:
    if not spread:
        return np.full(count, mean, np.int64)
    drawn = random.lognormal(math.log(mean) - spread * spread / 2.0, spread, count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def read_trace(path: Path) -> Traffic:
    """Read a CSV. Raises ConfigError naming file, line and column of the first bad row."""
    where = f"--trace {path}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from None
    reader = csv.reader(text.splitlines())
    columns: list[str] | None = None
    rows: list[tuple[float, int, int, str, int | None]] = []
    for cells in reader:
        cells = [cell.strip() for cell in cells]
        if not any(cells):
            continue
        if columns is None:
            columns, is_header = _columns(cells, where)
            if is_header:
                continue
        rows.append(_row(cells, columns, f"{where}, line {reader.line_num}"))
    if not rows:
        raise ConfigError(f"{where}: holds no requests", hint=f"its columns are {','.join(COLUMNS)}")
    return _traffic(rows)


def _columns(cells: list[str], where: str) -> tuple[list[str], bool]:
    if not any(cell in COLUMNS for cell in cells):
        return list(COLUMNS), False
    unknown = [cell for cell in cells if cell not in COLUMNS]
    if unknown or len(set(cells)) < len(cells):
        raise ConfigError(f"{where}, line 1: the header has {unknown or cells}; columns are {','.join(COLUMNS)}")
    missing = [name for name in COLUMNS[:3] if name not in cells]
    if missing:
        raise ConfigError(f"{where}, line 1: the header has no column {missing[0]}")
    return cells, True


def _row(cells: list[str], columns: list[str], where: str) -> tuple[float, int, int, str, int | None]:
    if not 3 <= len(cells) <= len(columns):
        raise ConfigError(f"{where}: has {len(cells)} columns, expected {','.join(columns)}")
    values: Mapping[str, str] = dict(zip(columns, cells, strict=False))
    shared = values.get("prefix_tokens", "")
    prompt = _count(values, "prompt_tokens", where)
    tokens = _count(values, "prefix_tokens", where) if shared else None
    if tokens is not None and not values.get("prefix_id"):
        raise ConfigError(f"{where}, column prefix_tokens: {tokens} without a prefix_id")
    if tokens is not None and tokens > prompt:
        raise ConfigError(f"{where}, column prefix_tokens: {tokens} are more than the {prompt} tokens of the prompt")
    return _arrival(values, where), prompt, _count(values, "output_tokens", where), values.get("prefix_id", ""), tokens


def _arrival(values: Mapping[str, str], where: str) -> float:
    cell = values.get("arrival", "")
    try:
        seconds = float(cell)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise ConfigError(f"{where}, column arrival: {cell!r} is not a number of seconds of at least 0")
    return seconds


def _count(values: Mapping[str, str], column: str, where: str) -> int:
    cell = values.get(column, "")
    if not cell.isascii() or not cell.isdecimal() or not 1 <= int(cell[:12]) <= _MOST_TOKENS or len(cell) > 12:
        raise ConfigError(f"{where}, column {column}: {cell!r} is not a whole number of tokens from 1 to 2^30")
    return int(cell)


def _traffic(rows: list[tuple[float, int, int, str, int | None]]) -> Traffic:
    arrival = np.array([row[0] for row in rows], np.float64)
    order = np.argsort(arrival, kind="stable")
    numbers: dict[str, int] = {}
    prefix = [numbers.setdefault(row[3], len(numbers)) if row[3] else -1 for row in rows]
    shared = [0 if not row[3] else row[1] if row[4] is None else row[4] for row in rows]
    return Traffic(
        arrival[order],
        np.array([row[1] for row in rows], np.int64)[order],
        np.array([row[2] for row in rows], np.int64)[order],
        np.array(prefix, np.int64)[order],
        np.array(shared, np.int64)[order],
    )
