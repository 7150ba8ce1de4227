"""The SPI keeps what it promised when it was frozen, and the comparison notices each way of breaking it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import spi_frozen

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def frozen() -> Any:
    return json.loads(spi_frozen.FROZEN.read_text(encoding="utf-8"))


def test_nothing_that_was_promised_is_broken(frozen: Any) -> None:
    broken = spi_frozen.complaints(frozen, spi_frozen.described())
    told = "docs/spi/versions.md says how to add and to take away (section `For whoever changes the SPI`)"
    assert not broken, "\n".join([*broken, told])


def _rename(now: Any) -> None:
    methods = now["names"]["device.Device"]["methods"]
    methods["to_chip"] = methods.pop("to_device")


def _argument(now: Any) -> None:
    now["names"]["device.Device"]["methods"]["zeros"].append(["pinned", "POSITIONAL_OR_KEYWORD", ""])


def _default(now: Any) -> None:
    next(f for f in now["names"]["program.Bucket"]["fields"] if f[0] == "query")[2] = "1"


def _abstract(now: Any) -> None:
    now["names"]["device.Device"]["abstract"].append("close")


def _member(now: Any) -> None:
    now["names"]["program.SamplingShape"]["members"]["GREEDY"] = "7"


def _quiet(now: Any) -> None:
    now["names"]["device.Device"]["methods"]["rest"] = [["self", "POSITIONAL_OR_KEYWORD", ""]]


def _attribute(now: Any) -> None:
    now["contracts"]["attention"]["attributes"]["slope"] = {
        "default": "None", "required": False, "since": 0, "choices": "()",
    }  # fmt: skip


def _signature(now: Any) -> None:
    now["contracts"]["linear"]["signature"] = "linear(x, w)"


BREAKS = [
    (_rename, "device.Device.to_device is gone"),
    (_argument, "pinned is new and has no default"),
    (_default, "program.Bucket.(fields) takes"),
    (_abstract, "device.Device.close must be written since"),
    (_member, "program.SamplingShape.GREEDY is another value"),
    (_quiet, "device.Device.rest is new: raise the minor of 'device'"),
    (_attribute, "attribute slope is new: give it a default and a minor of its own"),
    (_signature, "contract linear: its signature is another"),
    (lambda now: now["names"].pop("quant.QuantTensor"), "quant.QuantTensor is gone"),
    (lambda now: now["contracts"].pop("rope"), "contract rope is gone"),
]


@pytest.mark.parametrize(("breaking", "told"), BREAKS)
def test_each_way_of_breaking_it_is_told(frozen: Any, breaking: Callable[[Any], object], told: str) -> None:
    now = copy.deepcopy(frozen)
    breaking(now)
    found = spi_frozen.complaints(frozen, now)
    assert any(told in line for line in found), found


def test_what_is_added_with_a_minor_and_a_default_is_welcome(frozen: Any) -> None:
    now = copy.deepcopy(frozen)
    _quiet(now)
    now["names"]["device.Device"]["methods"]["zeros"].append(["pinned", "POSITIONAL_OR_KEYWORD", "False"])
    now["interfaces"]["device"] = "1.1"
    _attribute(now)
    now["contracts"]["attention"]["attributes"]["slope"]["since"] = 1
    now["contracts"]["attention"]["version"] = "1.1"
    assert not spi_frozen.complaints(frozen, now)


def test_a_new_major_is_another_promise(frozen: Any) -> None:
    now = copy.deepcopy(frozen)
    now["interfaces"]["device"] = "2.0"
    _rename(now)
    assert not spi_frozen.complaints(frozen, now)
