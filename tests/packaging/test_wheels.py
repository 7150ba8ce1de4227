"""Wheels of the SPI, the processor plugin and a stranger's plugin, built and installed in a fresh environment."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from fresh import CHECKOUT, Environment, Wheelhouse, build_wheel

from hardpoint.cli.plugin import write
from hardpoint_platforms.conformance.ladder import LEVELS

pytestmark = pytest.mark.packaging

CPU = CHECKOUT / "plugins" / "cpu"
LIBRARY = "hardpoint_cpu/lib/libhardpoint_cpu_kernels.so"
GUIDE = CHECKOUT / "docs" / "how-to" / "write-a-plugin.md"
REPORT = """
import json
from hardpoint_platforms.discovery import discover
from hardpoint_platforms.doctor import diagnose
from hardpoint_platforms.selection import select
import hardpoint_platforms, hardpoint_cpu
registry = discover()
rows = {row.platform: [row.status, row.distribution, [d.computed for d in row.devices]] for row in diagnose(registry)}
chosen = [select(request, registry).platform for request in ("auto", "cpu")]
print(json.dumps([rows, chosen, hardpoint_platforms.__file__, hardpoint_cpu.__file__]))
"""


def guide_files() -> dict[str, str]:
    """The files that the guide puts into a new plugin: each fenced block whose first line is `# file: PATH`."""
    files = {}
    for block in GUIDE.read_text(encoding="utf-8").split("```")[1::2]:
        _, _, body = block.partition("\n")
        head, _, content = body.partition("\n")
        if head.startswith("# file: "):
            files[head.removeprefix("# file: ").strip()] = content
    return files


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, wheelhouse: Wheelhouse) -> Path:
    """Our three distributions, the processor's with its kernels, and the guide's plugin as wheels in one folder."""
    source, out = tmp_path_factory.mktemp("new") / "acme", tmp_path_factory.mktemp("wheels")
    write("acme", source)
    for name, content in guide_files().items():
        (source / name).write_text(content, encoding="utf-8")
    for wheel in wheelhouse.wheels("hardpoint_platforms", "hardpoint"):
        shutil.copy(wheel, out)
    for folder in (CPU, source):
        build_wheel(folder, out, CMAKE_ARGS="-DHP_HERE_ONLY=ON")
    return out


@pytest.fixture(scope="module")
def environment(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment with the SPI, the core and the processor plugin."""
    made = Environment(tmp_path_factory.mktemp("fresh"))
    made.install(*wheels.glob("hardpoint*.whl"))
    return made


def test_wheels_hold_manifest_and_types(wheels: Path) -> None:
    held = {path.name.partition("-")[0]: set(zipfile.ZipFile(path).namelist()) for path in wheels.glob("*.whl")}
    for package in ("hardpoint_platforms", "hardpoint_cpu"):
        assert {f"{package}/hardpoint.json", f"{package}/py.typed"} <= held[package]
    assert {"acme_hardpoint/hardpoint.json", "acme_hardpoint/attention.py"} <= held["acme_hardpoint"]
    assert LIBRARY in held["hardpoint_cpu"]
    assert not any("native/src" in name for name in held["hardpoint_cpu"])


def test_a_plugin_comes_and_goes(environment: Environment, wheels: Path) -> None:
    rows, chosen, spi, cpu = json.loads(environment.python("-c", REPORT))
    assert str(CHECKOUT) not in spi
    assert str(CHECKOUT) not in cpu
    assert rows["cpu"][:2] == ["PASS", "hardpoint-cpu"]
    assert rows["reference"][0] == "PASS"
    assert (chosen, "acme" in rows) == (["cpu", "cpu"], False)

    environment.install(*wheels.glob("acme_*.whl"))
    rows, chosen, _, _ = json.loads(environment.python("-c", REPORT))
    assert rows["acme"][:2] == ["PASS", "acme-hardpoint"]
    assert "through 'acme linear'" in rows["acme"][2][0]
    assert chosen == ["acme", "cpu"]

    environment.uninstall("acme-hardpoint")
    rows, chosen, _, _ = json.loads(environment.python("-c", REPORT))
    assert "acme" not in rows
    assert chosen == ["cpu", "cpu"]


def test_kernels_are_in_the_wheel_and_run(environment: Environment) -> None:
    said = environment.hardpoint("doctor")
    assert "kernels  native " in said
    assert "through 'native linear'" in said


def test_without_a_compiler_it_installs_and_says_so(wheelhouse: Wheelhouse, tmp_path: Path) -> None:
    assert "WITHOUT its kernels" in wheelhouse.said
    (wheel,) = wheelhouse.wheels("hardpoint_cpu")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()
    made = Environment(tmp_path / "fresh")
    made.install(*wheelhouse.wheels())
    said = made.hardpoint("doctor")
    told = " ".join(said.split())
    assert "kernels torch (no kernel library was built" in told
    assert "install a C++ compiler" in told


def test_the_guides_plugin_is_what_the_guide_says(environment: Environment, wheels: Path) -> None:
    environment.install(*wheels.glob("acme_*.whl"))
    groups = [word for name in ("ops", "state", "programs", "sampling") for word in ("--group", name)]
    said = environment.hardpoint("conformance", "--device", "acme", "--level", "3", *groups, "--json")
    report = json.loads(said)
    passed = {row["contract"] for row in report["verdicts"] if row["status"] == "pass"}
    asked = {contract for level in LEVELS[:4] for contract in level.contracts}
    assert asked | {"state_cache", "program"} <= passed
    assert not [row for row in report["verdicts"] if row["status"] == "fail"]


@pytest.mark.real_model
def test_a_strangers_plugin_serves_a_real_model(environment: Environment, wheels: Path, smollm2_path: Path) -> None:
    environment.install(*wheels.glob("acme_*.whl"))
    said = environment.hardpoint(
        "run", smollm2_path, "What is the capital of France?", "--device", "acme", "--temperature", "0",
        "--max-tokens", "16", "--max-model-len", "256",
    )  # fmt: skip
    assert "Paris" in said
    rows = json.loads(environment.hardpoint("explain", smollm2_path, "--device", "acme", "--json"))
    taken = {row["provider"] for row in rows if row["op"] == "linear"}
    assert taken == {"acme linear"}
    assert {row["provider"] for row in rows if row["op"] == "attention"} == {"acme attention"}
