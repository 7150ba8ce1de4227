"""Environment variables have types, and a wrong value is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint import env
from hardpoint.errors import ConfigError


def test_defaults() -> None:
    assert env.HOME.read({}) == Path.home() / ".cache" / "hardpoint"
    assert env.API_KEY.read({}) is None
    assert env.DEBUG.read({}) is False
    assert env.NO_COLOR.read({"NO_COLOR": ""}) is False


def test_values(tmp_path: Path) -> None:
    assert env.HOME.read({"HARDPOINT_HOME": str(tmp_path)}) == tmp_path
    assert env.DEBUG.read({"HARDPOINT_DEBUG": "1"}) is True
    assert env.DEBUG.read({"HARDPOINT_DEBUG": "off"}) is False
    assert env.LOG_LEVEL.read({"HARDPOINT_LOG_LEVEL": "INFO"}) == "info"
    assert env.NO_COLOR.read({"NO_COLOR": "0"}) is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HARDPOINT_DEBUG", "maybe"),
        ("HARDPOINT_LOG_LEVEL", "loud"),
        ("HARDPOINT_HOME", __file__),
        ("HARDPOINT_API_KEY", " k"),
    ],
)
def test_a_wrong_value_is_fatal_and_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        env.check({name: value})
    assert caught.value.hint is not None
    assert name in caught.value.hint
