from __future__ import annotations

import json

import pytest

from hardpoint_platforms.errors import PlatformError
from hardpoint_platforms.manifest import Manifest, parse_manifest
from hardpoint_platforms.options import validate_options


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    properties = {
        "threads": {"type": "integer", "minimum": 1, "maximum": 64, "description": "how many"},
        "mode": {"type": "string", "enum": ["fast", "exact"], "default": "fast"},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "log": {"type": "boolean", "default": False},
    }
    text = {
        "manifest": "1.0", "name": "acme", "kind": "host", "interfaces": {"platform": "1.0", "device": "1.0"},
        "options_schema": {"properties": properties},
    }  # fmt: skip
    return parse_manifest(json.dumps(text), "acme")


def test_defaults_are_filled_in_and_null_means_not_given(manifest: Manifest) -> None:
    assert validate_options(manifest, {}) == {"mode": "fast", "log": False}
    assert validate_options(manifest, {"threads": None, "mode": None}) == {"mode": "fast", "log": False}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"threads": 4}, 4),
        ({"threads": "4"}, 4),
        ({"threads": 4.0}, 4),
        ({"mode": "exact"}, "exact"),
        ({"share": "0.25"}, 0.25),
        ({"share": 1}, 1),
        ({"log": "on"}, True),
        ({"log": True}, True),
        ({"log": "no"}, False),
    ],
)
def test_values_are_read_as_their_type(manifest: Manifest, given: dict[str, object], read: object) -> None:
    (name,) = given
    assert validate_options(manifest, given)[name] == read


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"threads": "many"}, "'many' is not of type integer"),
        ({"threads": 1.5}, "1.5 is not of type integer"),
        ({"threads": "1.5"}, "not of type integer"),
        ({"threads": True}, "True is not of type integer"),
        ({"threads": float("nan")}, "not of type integer"),
        ({"threads": float("inf")}, "not of type integer"),
        ({"threads": 0}, "0 is below 1"),
        ({"threads": 65}, "65 is above 64"),
        ({"share": "nan"}, "nan is below 0"),
        ({"share": [1]}, "not of type number"),
        ({"mode": "slow"}, "'slow' is not one of fast, exact"),
        ({"mode": 3}, "3 is not of type string"),
        ({"log": "perhaps"}, "not of type boolean"),
        ({"thread": 3}, "no option 'thread'"),
    ],
)
def test_what_is_wrong_is_said(manifest: Manifest, given: dict[str, object], said: str) -> None:
    with pytest.raises(PlatformError) as caught:
        validate_options(manifest, given)
    assert said in caught.value.message
    assert "acme" in caught.value.message
    assert caught.value.hint


def test_a_near_name_is_suggested(manifest: Manifest) -> None:
    with pytest.raises(PlatformError) as caught:
        validate_options(manifest, {"thread": 3})
    assert "did you mean 'threads'?" in str(caught.value)
    assert "threads (integer, at least 1, at most 64): how many" in str(caught.value)
