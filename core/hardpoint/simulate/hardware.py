"""The hardware table: what one chip can do, from `hardware.json` or a file of the same form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hardpoint.errors import ConfigError

TABLE = Path(__file__).with_name("hardware.json")

#: Where a chip has no peak for a dtype, it computes in the next of these.
_WIDER = {"float8": "bfloat16", "int8": "bfloat16", "float16": "bfloat16", "bfloat16": "float32"}
_RATES = ("memory_bandwidth", "memory", "link_bandwidth")
_SECONDS = ("link_start", "launch")
_SHARES = ("compute_share", "attention_share", "memory_share", "link_share")


@dataclass(frozen=True)
class Hardware:
    """One chip.

    Attributes:
        name: its row; title: its maker's name for it.
        peak: operations per second by dtype, a multiply-add counting as two.
        memory_bandwidth: bytes per second.
        memory: bytes.
        link_bandwidth: bytes per second and direction to the other chips of its group.
        link_start: seconds that a collective takes beside its bytes.
        launch: seconds that each op takes beside its bytes and operations.
        compute_share, attention_share, memory_share, link_share: what products, attention, reading and collectives
            reach of the peaks.
        weight_only_peak: dtype in whose peak products with integer weights of fewer than 8 bits run; None for the
            activations'.
        sources: where each number is from.
    """

    name: str
    title: str
    peak: Mapping[str, float]
    memory_bandwidth: float
    memory: float
    link_bandwidth: float
    link_start: float
    launch: float
    compute_share: float
    attention_share: float
    memory_share: float
    link_share: float
    weight_only_peak: str | None
    sources: Mapping[str, str]

    def operations(self, dtype: str) -> float:
        """Peak operations per second in `dtype`, or in the next wider one that the chip has."""
        word: str | None = dtype
        while word is not None:
            if word in self.peak:
                return self.peak[word]
            word = _WIDER.get(word)
        return max(self.peak.values())


def hardware_names(path: Path = TABLE) -> list[str]:
    """Rows of the table."""
    return list(_read(path))


def load_hardware(name: str) -> Hardware:
    """A row of the table; or FILE.json, or FILE.json:ROW, a table of the user's own.

    Raises ConfigError for a name that is not there, naming those that are, and for a row that is not complete.
    """
    path, row = TABLE, name
    file, colon, rest = name.rpartition(":")
    if name.endswith(".json"):
        path, row = Path(name), ""
    elif colon and file.endswith(".json"):
        path, row = Path(file), rest
    rows = _read(path)
    if not row and len(rows) == 1:
        row = next(iter(rows))
    if row not in rows:
        near = get_close_matches(row, rows, n=1)
        raise ConfigError(
            f"--hardware {name!r}: {path.name} has no such row; it has {', '.join(rows)}",
            hint=f"did you mean {near[0]}?" if near else "or write a table of your own: --hardware FILE.json:ROW",
        )
    return _hardware(row, rows[row], path)


def _read(path: Path) -> dict[str, Any]:
    try:
        chips = json.loads(path.read_text(encoding="utf-8"))["chips"]
        if not isinstance(chips, dict) or not chips:
            raise TypeError
    except OSError as error:
        raise ConfigError(f"--hardware {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--hardware {path}: is no JSON: {error}") from None
    except (KeyError, TypeError):
        raise ConfigError(f'--hardware {path}: has no rows under "chips"') from None
    return chips


def _hardware(name: str, row: Any, path: Path) -> Hardware:
    where = f"--hardware {name}: {path.name}"
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: the row is no object")
    peak = row.get("peak")
    if not isinstance(peak, dict) or not peak:
        raise ConfigError(f'{where}: "peak" must map dtypes to operations per second')
    numbers = {key: _number(row.get(key), f"{where}: {key!r}", zero=key in _SECONDS) for key in _RATES + _SECONDS}
    for key in _SHARES:
        numbers[key] = _number(row.get(key, 1.0), f"{where}: {key!r}")
        if numbers[key] > 1:
            raise ConfigError(f"{where}: {key!r} is {numbers[key]:g}: a share is at most 1")
    sources = row.get("sources", {})
    return Hardware(
        name=name,
        title=str(row.get("title", name)),
        peak={str(key): _number(value, f"{where}: peak {key!r}") for key, value in peak.items()},
        weight_only_peak=row.get("weight_only_peak"),
        sources={str(key): str(value) for key, value in sources.items()} if isinstance(sources, dict) else {},
        **numbers,
    )


def _number(value: Any, what: str, *, zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{what} must be a number, got {value!r}")
    if value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{what} must be above 0, got {value!r}")
    return float(value)
