"""Loading: one plugin that misbehaves is one PluginError under its name, and nothing else breaks (S-30, S-31, S-42)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import DeviceUnavailable, PluginError
from hardpoint_platforms.selection import select

pytestmark = pytest.mark.reference

HOOK = "from hardpoint_platforms.hookspecs import hookimpl\n"
OPEN = "    def open(self, index, options):"
DOCTOR = """
import json, sys
from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import HardpointError
from hardpoint_platforms.selection import select
try:
    chosen = select(sys.argv[1], discover())
except HardpointError as error:
    sys.exit(str(error))
print(json.dumps([chosen.platform, chosen.warnings]))
"""


def hook(body: str, name: str = "hardpoint_platform", arguments: str = "") -> str:
    return f"{HOOK}@hookimpl\ndef {name}({arguments}):\n    {body}\n"


#: S-30 a to g and S-42: source (or change of the working one), entry point, and what the message must hold.
BROKEN = {
    "import raises": ("import no_such_module", None, "import", "No module named 'no_such_module'"),
    "gone from the SPI": ("from hardpoint_platforms.device import Gadget", None, "import", "'Gadget'"),
    "hook raises": (hook("raise OSError('libacme.so')"), None, "import", "failed: OSError: libacme.so"),
    "no attribute": (HOOK, "acme_hardpoint.platform:nothing", "import", "has no attribute 'nothing'"),
    "no hook": ("def hardpoint_platform(): ...", None, "validation", "has no `@hookimpl def hardpoint_platform()`"),
    "class path": (hook("return 'acme.missing:It'"), None, "validation", "returned 'acme.missing:It' (str), not a Pl"),
    "exits": ("import sys\nsys.exit(3)", None, "import", "SystemExit: 3"),
    "syntax": ("def broken(:", None, "import", "SyntaxError"),
    "hook with arguments": (hook("return None", arguments="config"), None, "validation", "config"),
    "unknown hook": (hook("return None", name="hardpoint_plattform"), None, "validation", "hardpoint_plattform"),
    "method missing": ((OPEN, "    def unfold(self, index, options):"), None, "validation", "abstract method"),
    "older method": (
        (OPEN, "    def open(self, index):"),
        None,
        "validation",
        "FakePlatform.open(self, index) cannot take the core's call Platform.open(self, index: 'int', options",
    ),
    "renamed argument": ((OPEN, "    def open(self, index, settings):"), None, "validation", "FakePlatform.open"),
    "one more": ((OPEN, "    def open(self, index, options, mode):"), None, "validation", "FakePlatform.open"),
}


@pytest.fixture
def broken(plugins, platform_code):
    def add(variant: str, **facts: object) -> tuple[str, str]:
        code, value, cause, said = BROKEN[variant]
        plugins.add(code=platform_code(code) if isinstance(code, tuple) else code, value=value, **facts)
        return cause, said

    return add


@pytest.mark.parametrize("variant", BROKEN)
def test_asked_by_name_it_is_an_error_with_the_cause(broken, variant) -> None:
    cause, said = broken(variant)
    registry = discover()
    for _ in range(2):
        with pytest.raises(PluginError) as caught:
            select("acme", registry)
        assert caught.value.cause == cause
        assert said in caught.value.message
        assert "acme-hardpoint 1.2" in caught.value.message
        assert caught.value.hint


@pytest.mark.parametrize("variant", BROKEN)
def test_auto_does_not_fall_to_the_host(broken, variant) -> None:
    _, said = broken(variant)
    with pytest.raises(PluginError) as caught:
        select("auto", discover())
    assert said in caught.value.message
    assert "--device cpu" in caught.value.hint


@pytest.mark.parametrize("variant", BROKEN)
def test_it_hides_no_healthy_plugin(broken, plugins, variant) -> None:
    _, said = broken(variant)
    plugins.add(name="healthy", priority=1)
    chosen = select("auto", discover())
    assert chosen.platform == "healthy"
    assert sum(said in warning for warning in chosen.warnings) == 1


def test_a_broken_host_plugin_is_a_warning(broken) -> None:
    _, said = broken("hook raises", kind="host", priority=99)
    chosen = select("auto", discover())
    assert chosen.platform == "cpu"
    assert len(chosen.warnings) == 1
    assert said in chosen.warnings[0]


def test_not_my_machine_is_silent(plugins) -> None:
    plugins.add(code=hook("return None"))
    chosen = select("auto", discover())
    assert (chosen.platform, chosen.warnings) == ("cpu", ())
    with pytest.raises(DeviceUnavailable, match="not my machine"):
        select("acme", discover())


@pytest.mark.parametrize("value", ["acme_hardpoint.platform:hardpoint_platform", "acme_hardpoint.platform:Hooks"])
def test_an_entry_point_may_name_an_object(plugins, value) -> None:
    extra = (
        "class Hooks:\n    @staticmethod\n    @hookimpl\n    def hardpoint_platform():\n        return FakePlatform()\n"
    )
    plugins.add(value=value, extra=extra)
    assert select("acme", discover()).platform == "acme"


def test_later_arguments_with_defaults_are_fine(plugins, platform_code) -> None:
    plugins.add(code=platform_code((OPEN, "    def open(self, index, options, *, mode=None):")))
    assert select("acme", discover()).platform == "acme"


def test_a_plugin_that_looks_for_itself_while_loading(plugins) -> None:
    plugins.add(
        extra="""
        from hardpoint_platforms.discovery import discover
        from hardpoint_platforms.selection import select
        CHOSEN = select("cpu", discover()).platform
        """
    )
    assert select("acme", discover()).platform == "acme"
    assert sys.modules["acme_hardpoint.platform"].CHOSEN == "cpu"


def test_many_threads_load_once(plugins) -> None:
    plugins.add(extra="import time; time.sleep(0.05)")
    registry, found = discover(), []
    threads = [threading.Thread(target=lambda: found.append(registry.load("acme"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def run(plugins, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(plugins.path)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_in_a_process_of_its_own(broken, plugins) -> None:
    broken("exits")
    plugins.add(name="loud", priority=1, extra="import os; print('printed'); os.system('echo from a child')")
    named = run(plugins, DOCTOR, "acme")
    assert named.returncode == 1
    assert "SystemExit: 3" in named.stderr
    healthy = run(plugins, DOCTOR, "auto")
    assert healthy.returncode == 0
    assert json.loads(healthy.stdout)[0] == "loud"
    assert "printed" in healthy.stderr
    assert "from a child" in healthy.stderr


ORDERS = {
    "plugin first": "import acme_hardpoint, acme_hardpoint.platform, hardpoint\n",
    "engine first": "import hardpoint\n",
    "in a thread": "",
}


@pytest.mark.parametrize("order", ORDERS)
def test_import_order_does_not_matter(plugins, order) -> None:
    plugins.add(
        extra="""
        import hardpoint
        from hardpoint.config.engine import EngineConfig
        """
    )
    (plugins.path / "acme_hardpoint" / "__init__.py").write_text("import hardpoint\nimport hardpoint_platforms\n")
    choose = "print(select('auto', discover()).platform)"
    if order == "in a thread":
        choose = f"import threading; t = threading.Thread(target=lambda: {choose}); t.start(); t.join()"
    imports = "from hardpoint_platforms.discovery import discover\nfrom hardpoint_platforms.selection import select\n"
    done = run(plugins, ORDERS[order] + imports + choose)
    assert done.stdout == "acme\n", done.stderr


def test_the_worker_process_chooses_the_same(plugins) -> None:
    plugins.add(extra="import hardpoint")
    (plugins.path / "choose.py").write_text(
        "import multiprocessing\n"
        "from hardpoint_platforms.discovery import discover\n"
        "from hardpoint_platforms.selection import select\n"
        "def choose(request):\n"
        "    return select(request, discover()).platform\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(choose('auto'), pool.apply(choose, ('auto',)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(plugins.path / "choose.py")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "acme acme\n", done.stderr


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_command_line_still_answers(broken, plugins, option) -> None:
    broken("exits")
    done = run(plugins, "from hardpoint.cli.main import main\nmain()", option)
    assert done.returncode == 0, done.stderr
    assert "hardpoint" in done.stdout
    assert "SystemExit: 3" not in done.stderr
