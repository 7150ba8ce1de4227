"""Every environment variable that Hardpoint reads, with its type. A wrong value is an error, never a default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hardpoint.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: as the shell spells it.
        doc: one line for `--help`.
        parse: turns the text into a value; raises ValueError with what would have been right.
        default: where the variable is unset or empty.
    """

    name: str
    doc: str
    parse: Callable[[str], T]
    default: T

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """The value now. Raises ConfigError for a text that does not parse."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(
                f"the environment variable {self.name} is {text!r}: {error}",
                hint=f"correct it, or `unset {self.name}`",
            ) from error


def _switch(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return words[text.lower()]
    except KeyError:
        raise ValueError("it must be 1 or 0") from None


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError("it must name a folder")
    return path.absolute()


def _level(text: str) -> str:
    levels = ("debug", "info", "warning", "error")
    if text.lower() not in levels:
        raise ValueError(f"it must be one of {', '.join(levels)}")
    return text.lower()


def _key(text: str) -> str:
    if text != text.strip() or not text.isprintable():
        raise ValueError("a key has no spaces around it and no control characters")
    return text


HOME = Variable(
    "HARDPOINT_HOME",
    "folder of pulled models and of the chat history",
    _folder,
    Path("~/.cache/hardpoint").expanduser(),
)
API_KEY: Variable[str | None] = Variable(
    "HARDPOINT_API_KEY", "key of `serve` (like --api-key), and what the clients send", _key, None
)
DEBUG = Variable("HARDPOINT_DEBUG", "1 shows tracebacks", _switch, False)
LOG_LEVEL = Variable("HARDPOINT_LOG_LEVEL", "debug, info, warning or error", _level, "warning")
#: https://no-color.org: any text that is not empty switches colours off.
NO_COLOR = Variable("NO_COLOR", "any text switches colours off", bool, False)

VARIABLES: tuple[Variable[Path] | Variable[str | None] | Variable[bool] | Variable[str], ...] = (
    HOME,
    API_KEY,
    DEBUG,
    LOG_LEVEL,
    NO_COLOR,
)


def check(environ: Mapping[str, str] | None = None) -> None:
    """Read them all once, so that a bad value is fatal at start and not where it is first used."""
    for variable in VARIABLES:
        variable.read(environ)
