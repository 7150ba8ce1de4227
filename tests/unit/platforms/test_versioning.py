"""Versions meet as promised: minors only add, two majors are served, and what will go is warned of by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hardpoint_platforms import deprecation
from hardpoint_platforms.deprecation import DEPRECATED, Deprecation, warn_overrides
from hardpoint_platforms.discovery import PlatformEntry, check_versions, discover
from hardpoint_platforms.errors import PluginError
from hardpoint_platforms.manifest import parse_manifest
from hardpoint_platforms.selection import open_device, select
from hardpoint_platforms.versioning import INTERFACES, OLDEST, Version, VersionRange, offers

ENTRY = PlatformEntry("acme", "acme-hardpoint", "3.1", "acme_hardpoint.platform")
#: A release of the future, whose device is at 2.1 and still serves 1.x, and whose platform left 1.x behind.
FUTURE = offers({"platform": Version(3, 0), "device": Version(2, 1)}, {"platform": 2, "device": 1})


def verdict(offered: dict[str, VersionRange], **interfaces: str) -> PluginError | None:
    text = json.dumps({"manifest": "1.0", "name": "acme", "kind": "test", "interfaces": interfaces})
    return check_versions(ENTRY, parse_manifest(text, "acme"), offered)


@pytest.mark.parametrize(
    ("spoken", "offered", "met"),
    [
        ("1.0", "1.0", "1.0"),
        ("1.0-1.2", "1.0-1.4", "1.2"),
        ("1.0-1.4", "1.0-1.2", "1.2"),
        ("1.3", "1.0-1.2", None),
        ("1.3-2.0", "1.0-1.2", None),
        ("1.0-1.2", "1.0-2.1", "1.2"),
        ("1.7", "1.0-2.1", "1.7"),
        ("1.0-2.3", "1.0-2.1", "2.1"),
        ("2.0", "1.0-2.1", "2.0"),
        ("2.2", "1.0-2.1", None),
        ("2.0", "1.0-1.9", None),
        ("1.0-2.3", "1.0-1.1", "1.1"),
        ("1.2", "2.0-3.0", None),
        ("1.2-2.0", "2.0-3.0", "2.0"),
        ("1.0-3.4", "2.0-3.0", "3.0"),
        ("0.9", "1.0-1.2", None),
        ("3.0", "1.0-2.9", None),
    ],
)
def test_where_a_plugin_and_a_release_meet(spoken: str, offered: str, met: str | None) -> None:
    ours, theirs = VersionRange.parse(offered), VersionRange.parse(spoken)
    assert theirs.meet(ours) == (Version.parse(met) if met else None)
    assert theirs.accepts(ours) is (met is not None)


def test_a_future_release_serves_plugins_of_the_major_before() -> None:
    assert verdict(FUTURE, platform="2.4", device="1.0-1.3") is None
    assert verdict(FUTURE, platform="2.0-3.0", device="1.0-2.3") is None


@pytest.mark.parametrize(
    ("interfaces", "told", "mend"),
    [
        (
            {"platform": "1.2", "device": "1.0"},
            "it speaks platform 1.2, this release offers 2.0-3.0",
            "pip install --upgrade acme-hardpoint   (or an older hardpoint-platforms",
        ),
        (
            {"platform": "2.0", "device": "2.2-2.5"},
            "it speaks device 2.2-2.5, this release offers 1.0-2.1",
            "pip install --upgrade hardpoint-platforms hardpoint   (or an older acme-hardpoint than 3.1)",
        ),
        (
            {"platform": "1.0", "device": "3.0"},
            "it speaks platform 1.0, this release offers 2.0-3.0; it speaks device 3.0, this release offers 1.0-2.1",
            "pip install --upgrade acme-hardpoint",
        ),
    ],
    ids=["its major is gone", "its minor is not there yet", "one of each"],
)
def test_a_future_release_names_both_ranges(interfaces: dict[str, str], told: str, mend: str) -> None:
    problem = verdict(FUTURE, **interfaces)
    assert problem is not None
    assert (problem.plugin, problem.cause) == ("acme", "version")
    assert told in problem.message
    assert (problem.hint or "").startswith(mend)


def test_an_interface_that_the_release_does_not_know_is_passed_over() -> None:
    assert verdict(FUTURE, platform="2.0", device="1.0", telepathy="7.0") is None


def test_this_release_serves_at_most_two_majors() -> None:
    assert set(OLDEST) == set(INTERFACES)
    for name, newest in INTERFACES.items():
        assert newest.major - 1 <= OLDEST[name] <= newest.major
        assert offers()[name].highest == newest
        assert offers()[name].lowest == Version(OLDEST[name], 0)


def old(owner: str, name: str, **changes: object) -> Deprecation:
    facts = {
        "interface": "device",
        "since": Version(1, 2),
        "removed": Version(2, 0),
        "instead": "override `wait`",
    } | changes
    return Deprecation(owner=owner, name=name, **facts)  # type: ignore[arg-type]


class Interface:
    """An interface of a later day."""

    label = "any"

    def stall(self) -> None:
        """Gone with 2.0."""

    def wait(self) -> None:
        """What came instead."""


class Theirs(Interface):
    """A plugin's."""

    label = "theirs"

    def stall(self) -> None:
        """Overridden."""


class Deeper(Theirs):
    """What the plugin's author derives from his own class."""


class Modern(Interface):
    def wait(self) -> None:
        """The new name alone."""


def told(subject: object, *table: Deprecation) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_overrides(ENTRY, subject, Interface, table)
    return list(caught)


@pytest.mark.parametrize("subject", [Theirs(), Deeper()])
def test_an_override_is_warned_of_under_the_plugins_name_at_its_line(subject: Interface) -> None:
    (warning,) = told(subject, old("Interface", "stall"))
    assert warning.category is DeprecationWarning
    assert str(warning.message) == (
        "acme-hardpoint 3.1: Theirs.stall is deprecated since device 1.2 and goes with device 2.0; "
        "override `wait` instead"
    )
    assert warning.filename == __file__
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[warning.lineno - 1].strip() == "def stall(self) -> None:"
    assert "class Theirs" in lines[warning.lineno - 6]


def test_attributes_count_and_new_names_do_not() -> None:
    assert "Theirs.label is deprecated" in str(told(Theirs(), old("Interface", "label"))[0].message)
    assert not told(Modern(), old("Interface", "stall"), old("Interface", "label"))
    assert not told(Theirs(), old("Other", "stall"))
    assert not told(Interface(), old("Interface", "wait"), old("Other", "stall"))


@dataclass(frozen=True)
class Facts:
    """What a device of a later day declares."""

    speed: int = 3
    sizes: tuple[int, ...] = field(default_factory=lambda: (1, 2))


@pytest.mark.parametrize(
    ("facts", "count"), [(Facts(), 0), (Facts(speed=3, sizes=(1, 2)), 0), (Facts(speed=4), 1), (Facts(sizes=()), 1)]
)
def test_a_field_counts_where_it_is_set(facts: Facts, count: int) -> None:
    table = [old("Facts", "speed"), old("Facts", "sizes")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_overrides(ENTRY, facts, Facts, table)
    assert len(caught) == count
    assert all("acme-hardpoint 3.1: Facts.s" in str(warning.message) for warning in caught)


def test_the_spis_own_classes_are_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Theirs, "__module__", "hardpoint_platforms.sim.platform")
    assert not told(Deeper(), old("Interface", "stall"))


@pytest.mark.parametrize("removed", [Version(1, 3), Version(1, 2), Version(2, 1), Version(1, 0)])
def test_nothing_goes_within_a_major(removed: Version) -> None:
    with pytest.raises(ValueError, match="may go with a later major"):
        old("Interface", "stall", removed=removed)


def test_what_is_deprecated_is_still_there() -> None:
    import hardpoint_platforms as spi

    for entry in DEPRECATED:
        assert entry.interface in INTERFACES
        assert hasattr(getattr(spi, entry.owner), entry.name), f"{entry.owner}.{entry.name} went before its time"
        assert entry.since <= INTERFACES[entry.interface]


@pytest.fixture
def probing_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (old("Platform", "probe", interface="platform", instead="override `look`"),)
    monkeypatch.setattr(deprecation, "DEPRECATED", table)


@pytest.mark.usefixtures("probing_is_old")
def test_loading_a_plugin_warns_and_goes_on(plugins: object, platform_code: Callable[..., str]) -> None:
    plugins.add("acme")  # type: ignore[attr-defined]
    with pytest.warns(
        DeprecationWarning, match=r"acme-hardpoint 1\.2: FakePlatform\.probe is deprecated since"
    ) as seen:
        assert discover().probe("acme").devices
    assert seen[0].filename.endswith("acme_hardpoint/platform.py")


@pytest.mark.usefixtures("probing_is_old")
def test_where_warnings_are_errors_the_plugin_is_at_fault_alone(plugins: object) -> None:
    plugins.add("acme")  # type: ignore[attr-defined]
    registry = discover()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PluginError, match="override `look` instead"):
            registry.load("acme")
    assert registry.probe("reference").devices


def test_opening_a_device_warns_and_goes_on(plugins: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "DEPRECATED", (old("Device", "memory"),))
    plugins.add("acme")  # type: ignore[attr-defined]
    chosen = select("acme", discover())
    with pytest.warns(DeprecationWarning, match=r"acme-hardpoint 1\.2: FakeDevice\.memory is deprecated since device"):
        open_device(chosen).close()
