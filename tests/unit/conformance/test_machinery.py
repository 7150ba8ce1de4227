"""The watchdog, blame, pictures of modules, ids and seeds of checks, flags."""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from types import ModuleType

import pytest

from hardpoint_platforms.conformance import blame
from hardpoint_platforms.conformance.checks import Check, Measure
from hardpoint_platforms.conformance.command import add_arguments, options_of
from hardpoint_platforms.conformance.picture import differences, picture
from hardpoint_platforms.conformance.watchdog import Hung, Watchdog
from hardpoint_platforms.errors import PlatformError


def _check(name: str = "two words/part", **more) -> Check:
    return Check("ops", "linear", name, 1, lambda subject, seed: Measure(), **more)


def test_ids_need_no_quotes() -> None:
    assert _check(dtype="float32").id == "ops/linear/two-words-part/float32"
    assert _check().id == "ops/linear/two-words-part"


def test_a_seed_belongs_to_check_and_run() -> None:
    assert _check().seed(1) == _check().seed(1)
    assert len({_check().seed(1), _check().seed(2), _check("other").seed(1)}) == 3


def test_watchdog_returns_raises_and_gives_up() -> None:
    dog = Watchdog((__file__,))
    assert dog.run(lambda: 7, 5.0) == 7
    with pytest.raises(KeyError, match="gone"):
        dog.run(lambda: {}["gone"], 5.0)
    with pytest.raises(SystemExit):
        dog.run(sys.exit, 5.0)
    released = threading.Event()
    with pytest.raises(Hung) as caught:
        dog.run(lambda: _stuck(released), 0.2)
    assert "_stuck" in caught.value.place
    assert __file__ in caught.value.place
    assert dog.run(threading.get_ident, 5.0) == dog.run(threading.get_ident, 5.0)
    released.set()
    dog.close()


def _stuck(released: threading.Event) -> None:
    while not released.is_set():
        time.sleep(0.01)


def test_blame_prefers_the_plugins_own_line() -> None:
    def plugin() -> None:
        int("x")

    with pytest.raises(ValueError) as caught:
        plugin()
    assert blame.of_error(caught.value, (__file__,)).endswith("in plugin")
    assert "plugin" in blame.of_error(caught.value, ())
    assert blame.of_error(ValueError("never raised"), ()) == ""


def test_blame_of_code() -> None:
    assert "test_machinery.py" in blame.of_code(_stuck)
    assert "_stuck" in blame.of_code(_stuck)
    assert "PluginFolder" in blame.of_code(PluginFolder())
    assert blame.of_code(len) == ""


class PluginFolder:
    """Something of this file."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("victim_package.part")
    exec("class Thing:\n    def go(self): return 1\ndef free(): return 2\nTABLE = {'a': free}", vars(made))
    made.Thing.__module__ = "victim_package.part"
    monkeypatch.setitem(sys.modules, "victim_package.part", made)
    return made


@pytest.mark.parametrize(
    ("patch", "name"),
    [
        (lambda m: setattr(m.Thing, "go", lambda self: 3), "victim_package.part.Thing.go"),
        (lambda m: setattr(m, "free", lambda: 3), "victim_package.part.free"),
        (lambda m: setattr(m, "Thing", object), "victim_package.part.Thing"),
        (lambda m: m.TABLE.update(a=len), "victim_package.part.TABLE"),
        (lambda m: delattr(m, "TABLE"), "victim_package.part.TABLE"),
        (lambda m: setattr(m.free, "__code__", (lambda: 3).__code__), "victim_package.part.free"),
    ],
)
def test_a_picture_sees_patches(module: ModuleType, patch, name: str) -> None:
    before = picture(("victim_package",))
    assert differences(before, picture(("victim_package",))) == []
    patch(module)
    assert name in differences(before, picture(("victim_package",)))


def test_additions_are_no_patches(module: ModuleType) -> None:
    before = picture(("victim_package",))
    module.more = 1
    assert differences(before, picture(("victim_package",))) == []


def test_flags() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--device", "acme", "--level", "3", "--case", "a", "--case", "b"])
    assert (args.device, args.level, args.case, args.json) == ("acme", 3, ["a", "b"], False)
    with pytest.raises(SystemExit):
        parser.parse_args(["--device", "acme", "--level", "7"])
    assert options_of(["threads=2", "dtype=float32", "x=true"]) == {"threads": 2, "dtype": "float32", "x": True}
    with pytest.raises(PlatformError, match="KEY=VALUE"):
        options_of(["threads"])


def test_nothing_heavy_until_a_device_is_named() -> None:
    """pytest loads the plugin in every run, and --help must answer at once."""
    code = (
        "import sys, hardpoint_platforms.conformance.pytest_plugin, hardpoint_platforms.conformance.command\n"
        "from hardpoint.cli.main import main\n"
        "assert main(['conformance', '--help']) == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'something heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--level" in done.stdout
