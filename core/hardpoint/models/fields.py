"""Typed reading of config.json: missing keys get the model type's defaults, wrong ones an error with their name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import ConfigError


class Fields:
    """A config under its defaults. A key that is present with null counts as null, not as missing."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values: dict[str, Any] = {**defaults, **config}

    def raw(self, key: str) -> Any:
        """The value as it stands, None where it is missing."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether config or defaults say anything but null."""
        return self._values.get(key) is not None

    def integer(self, key: str, *, least: int = 1) -> int:
        """A whole number of at least `least`. Raises ConfigError, also where it is missing."""
        value = self._values.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"config.json: {key!r} must be a whole number of at least {least}, got {value!r}")
        return value

    def optional_integer(self, key: str, *, least: int = 1) -> int | None:
        """Like `integer`, None where it is missing or null."""
        return self.integer(key, least=least) if self.has(key) else None

    def number(self, key: str) -> float:
        """A finite number above zero."""
        return positive_number(self._values.get(key), key)

    def optional_number(self, key: str) -> float | None:
        """Like `number`, None where it is missing or null."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str) -> bool:
        """A boolean; missing or null is False."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"config.json: {key!r} must be true or false, got {value!r}")
        return bool(value)

    def optional_flag(self, key: str) -> bool | None:
        """Like `flag`, None where it is missing or null."""
        return self.flag(key) if self.has(key) else None

    def layer_list(self, key: str, layers: int, allowed: Sequence[str]) -> tuple[str, ...] | None:
        """One word per layer, each among `allowed`; None where it is missing or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) < layers:
            raise ConfigError(f"config.json: {key!r} must list {layers} layers, got {value!r}")
        for word in value[:layers]:
            if word not in allowed:
                raise ConfigError(f"config.json: {key!r} holds {word!r}; known are {', '.join(allowed)}")
        return tuple(value[:layers])

    def section(self, key: str) -> dict[str, Any]:
        """A nested object, empty where it is missing or null."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {key!r} must be an object, got {value!r}")
        return dict(value)


def positive_number(value: Any, key: str) -> float:
    """A finite number above zero; digits in quotes count. Raises ConfigError naming `key`."""
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(f"config.json: {key!r} must be a number above 0, got {value!r}")
    return number
