from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint_platforms.manifest import Kind, UnknownManifestVersion, parse_manifest
from hardpoint_platforms.versioning import Version, VersionRange

GOOD = {
    "manifest": "1.0",
    "name": "acme",
    "vendor": "Acme",
    "kind": "accelerator",
    "interfaces": {"platform": "1.0", "device": "1.0-1.2"},
    "options_schema": {
        "properties": {"threads": {"type": "integer", "minimum": 1, "default": 2, "description": "how many"}}
    },
    "process_exclusive": ["acme-runtime"],
    "requires": ["acme_runtime"],
    "priority": 7,
}


def parse(**changes: object) -> object:
    data = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    return parse_manifest(json.dumps(data), "acme")


def test_every_field_is_read() -> None:
    manifest = parse()
    assert (manifest.name, manifest.vendor, manifest.kind, manifest.priority) == ("acme", "Acme", Kind.ACCELERATOR, 7)
    assert manifest.interfaces["device"] == VersionRange(Version(1, 0), Version(1, 2))
    assert manifest.process_exclusive == ("acme-runtime",)
    assert manifest.requires == ("acme_runtime",)
    assert manifest.options["threads"].describe() == "threads (integer, at least 1, default 2): how many"


def test_several_platforms_in_one_file() -> None:
    one = {key: value for key, value in GOOD.items() if key not in ("manifest", "name")}
    text = json.dumps({"manifest": "1.0", "platforms": {"acme": one, "acme-sim": one | {"kind": "test"}}})
    assert parse_manifest(text, "acme").kind is Kind.ACCELERATOR
    assert parse_manifest(text, "acme-sim").kind is Kind.TEST
    with pytest.raises(ValueError, match=r"platforms has no 'other', it has \['acme', 'acme-sim'\]"):
        parse_manifest(text, "other")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"manifest": ...}, "manifest must be str"),
        ({"manifest": "one"}, "manifest: 'one' is not a version"),
        ({"name": "other"}, "name is 'other', the entry point's name is 'acme'"),
        ({"kind": "gpu"}, "kind is 'gpu', not one of accelerator, host, test"),
        ({"interfaces": ["device"]}, "interfaces must be dict"),
        ({"interfaces": {"device": "1"}}, "interfaces.device"),
        ({"interfaces": {"device": "1.2-1.0"}}, "ends before it starts"),
        ({"priority": "high"}, "priority must be int"),
        ({"priority": True}, "priority must be int"),
        ({"requires": "torch"}, "requires must be list"),
        ({"options_schema": {"properties": {"x": {"type": "object"}}}}, "options_schema.properties.x.type"),
        ({"prority": 3}, r"unknown fields \['prority'\]"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(**changes)


def test_a_newer_format_says_so() -> None:
    with pytest.raises(UnknownManifestVersion, match=r"format 9\.0, this release reads 1\.0"):
        parse(manifest="9.0")


def test_a_newer_minor_may_add_fields() -> None:
    assert parse(manifest="1.9", colour="red").name == "acme"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.sampled_from(sorted(GOOD)), s),
    )
)
def test_nothing_but_value_error_for_any_json(data: object) -> None:
    try:
        parse_manifest(json.dumps(data), "acme")
    except ValueError:
        return
    assert isinstance(data, dict)


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[" * 100_000])
def test_text_that_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"hardpoint\.json"):
        parse_manifest(text, "acme")
