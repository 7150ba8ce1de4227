"""Step times that were recorded on a device, instead of a cost model: the form that a vendor can give away.

A CSV with a header, `tokens,seconds` or `tokens,context,seconds`:

    tokens    of the whole step, as the device ran it
    context   cached tokens that the step's requests read, all together
    seconds   of the step

Between recorded counts the time is interpolated linearly, with `context` in both directions (then every context must be
there for every token count). Below the smallest count it is that of the smallest; beyond the largest the last slope
goes on. A single count costs its time up to there, and proportionally more beyond.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from pathlib import Path

from hardpoint.errors import ConfigError
from hardpoint.simulate.cost import Attended, StepCost


class RecordedCost(StepCost):
    """A table of step times. Raises ConfigError naming file, line and column."""

    windows = (None,)

    def __init__(self, path: Path) -> None:
        rows = _read(path)
        self._tokens = sorted({tokens for tokens, _ in rows})
        self._contexts = sorted({context for _, context in rows})
        missing = [(t, c) for t in self._tokens for c in self._contexts if (t, c) not in rows]
        if missing:
            raise ConfigError(
                f"--step-times {path}: there is no row for tokens {missing[0][0]:g} with context {missing[0][1]:g}",
                hint="record every context for every token count",
            )
        self._seconds = [[rows[t, c] for c in self._contexts] for t in self._tokens]

    def seconds(self, tokens: int, samples: int, attended: Attended) -> float:
        read = float(attended[0][1])
        by_tokens = [_between(self._contexts, row, read) for row in self._seconds]
        return max(0.0, _between(self._tokens, by_tokens, float(tokens)))


def _between(points: list[float], values: list[float], at: float) -> float:
    if at <= points[0]:
        return values[0]
    if len(points) == 1:
        return values[0] * at / points[0] if points[0] > 0 else values[0]
    right = min(bisect_right(points, at), len(points) - 1)
    left = right - 1
    return values[left] + (values[right] - values[left]) * (at - points[left]) / (points[right] - points[left])


def _read(path: Path) -> dict[tuple[float, float], float]:
    where = f"--step-times {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from None
    reader = csv.reader(text.splitlines())
    header = [name.strip() for name in next(reader, [])]
    if header not in (["tokens", "seconds"], ["tokens", "context", "seconds"]):
        raise ConfigError(f"{where}, line 1: the header is {','.join(header)!r}, not tokens,[context,]seconds")
    rows: dict[tuple[float, float], float] = {}
    for cells in reader:
        line = reader.line_num
        if not cells:
            continue
        if len(cells) != len(header):
            raise ConfigError(f"{where}, line {line}: has {len(cells)} columns, the header {len(header)}")
        values = {
            name: _number(cell, f"{where}, line {line}, column {name}")
            for name, cell in zip(header, cells, strict=True)
        }
        key = (values["tokens"], values.get("context", 0.0))
        if key in rows:
            raise ConfigError(f"{where}, line {line}: tokens {key[0]:g} with context {key[1]:g} was there before")
        rows[key] = values["seconds"]
    if not rows:
        raise ConfigError(f"{where}: holds no step times")
    return rows


def _number(cell: str, what: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{what}: {cell.strip()!r} is not a number of at least 0")
    return value
