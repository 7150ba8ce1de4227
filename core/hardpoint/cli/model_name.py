"""Which model a command means when it names none."""

from __future__ import annotations

from hardpoint.errors import ConfigError, ModelNotFound

#: Small (98 MB), permissively licensed, and good enough to see everything work.
DEFAULT_MODEL = "smollm2"


def chosen_model(given: str | None, command: str) -> str:
    """`given`, or the default model if it was pulled. Raises ConfigError that says what to type."""
    if given:
        return given
    from hardpoint.weights.store import resolve

    try:
        resolve(DEFAULT_MODEL)
    except ModelNotFound:
        raise ConfigError(
            f"no model named, and the default model {DEFAULT_MODEL!r} is not here yet",
            hint=f"hardpoint pull {DEFAULT_MODEL} && hardpoint {command}   (or name one: hardpoint {command} MODEL)",
        ) from None
    return DEFAULT_MODEL


def shown_name(model: str) -> str:
    """A model as people call it: the last part of a path, the id itself otherwise."""
    return model.rstrip("/").rsplit("/", 1)[-1] if model.startswith(("/", "./", "../", "~")) else model
