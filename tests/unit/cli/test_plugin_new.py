"""`hardpoint plugin new`: what it writes, what it says, and which names and folders it refuses."""

from __future__ import annotations

import ast
import json
import shlex
import tomllib
from pathlib import Path

import pytest

from hardpoint.cli import plugin
from hardpoint.cli.main import COMMANDS, main, parse
from hardpoint.errors import ConfigError
from hardpoint_platforms.manifest import Kind, parse_manifest
from hardpoint_platforms.versioning import INTERFACES, REQUIRED_INTERFACES

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "write-a-plugin.md"
MOST_PYTHON_LINES = 149
TREE = {
    ".github/workflows/ci.yml",
    ".gitignore",
    "README.md",
    "acme_npu_hardpoint/__init__.py",
    "acme_npu_hardpoint/device.py",
    "acme_npu_hardpoint/hardpoint.json",
    "acme_npu_hardpoint/linear.py",
    "acme_npu_hardpoint/platform.py",
    "pyproject.toml",
    "tests/test_acme_npu_hardpoint.py",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_the_whole_distribution_and_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", "acme-npu"]) == 0
    folder = here / "acme-npu-hardpoint"
    assert tree(here) == {f"acme-npu-hardpoint/{path}" for path in TREE}
    assert folder.stat().st_mode & 0o055 == 0o055
    said = capsys.readouterr().out
    assert {line.removeprefix("wrote acme-npu-hardpoint/") for line in said.splitlines() if "wrote" in line} == TREE


def test_the_next_commands_are_three_that_work_from_here(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", "acme", "--into", "my chips/acme"]) == 0
    _, _, told = capsys.readouterr().out.partition("Next\n")
    install, *ours = [line.strip() for line in told.splitlines()]
    assert len(ours) == 2
    assert shlex.split(install)[:2] == ["pip", "install"]
    assert (here / shlex.split(install)[2] / "pyproject.toml").is_file()
    for line in " && ".join(ours).split(" && "):
        program, *words = line.split()
        assert (program, words[0] in COMMANDS) == ("hardpoint", True)
        parse(words)
    assert ours[-1].endswith("--device acme")


def test_the_guide_shows_what_is_really_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", "acme"]) == 0
    assert f"$ hardpoint plugin new acme\n{capsys.readouterr().out}```" in GUIDE.read_text(encoding="utf-8")


def test_absolute_folders_are_named_as_they_are(tmp_path: Path) -> None:
    assert plugin.next_commands("acme", tmp_path / "x")[0] == f"pip install {tmp_path / 'x'}"


def test_pyproject_announces_the_platform() -> None:
    project = tomllib.loads(plugin.render("acme-npu")["pyproject.toml"])
    assert project["project"]["name"] == "acme-npu-hardpoint"
    announced = project["project"]["entry-points"]["hardpoint.platforms"]
    assert announced == {"acme-npu": "acme_npu_hardpoint.platform"}
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["acme_npu_hardpoint"]
    (needed,) = project["project"]["dependencies"]
    assert needed.startswith("hardpoint-platforms>=")


def test_the_manifest_is_valid_and_speaks_the_installed_interfaces() -> None:
    manifest = parse_manifest(plugin.render("acme-npu")["acme_npu_hardpoint/hardpoint.json"], "acme-npu")
    assert manifest.kind is Kind.TEST, "`--device auto` must not take a chip that nobody has brought up"
    assert {*REQUIRED_INTERFACES, "ops"} == set(manifest.interfaces)
    for name, spoken in manifest.interfaces.items():
        assert spoken.lowest == spoken.highest == INTERFACES[name]
    assert manifest.options["memory_mib"].default == 4096


def test_the_python_is_short_and_leans_on_the_interface_alone() -> None:
    sources = {path: text for path, text in plugin.render("acme-npu").items() if path.endswith(".py")}
    assert len(sources) == 5
    assert sum(len(text.splitlines()) for text in sources.values()) <= MOST_PYTHON_LINES
    for path, text in sources.items():
        modules = [
            name
            for node in ast.walk(ast.parse(text, path))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
        ]
        assert not [name for name in modules if name.split(".")[0] == "hardpoint"], path
        assert max(map(len, text.splitlines())) <= 120


def test_no_placeholder_is_left_and_the_workflow_keeps_its_own() -> None:
    written = plugin.render("acme-npu")
    for path, text in written.items():
        assert "$" not in text.replace("${{ matrix.python }}", ""), path
    assert "python-version: ${{ matrix.python }}" in written[".github/workflows/ci.yml"]


def test_every_template_is_used() -> None:
    folder = Path(plugin.__file__).parent / "plugin_template"
    assert {path.name for path in folder.iterdir()} == set(plugin.FILES)


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("Acme", "acme"),
        ("acme_npu", "acme-npu"),
        ("acme--npu", "acme-npu"),
        ("2acme", "acme"),
        ("acme:0", "acme-0"),
        ("Auto", "acme"),
        ("", "acme"),
        ("日本", "acme"),
        ("a" * 41, "a" * 40),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_that_can(name: str, better: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a plugin") as caught:
        plugin.check_name(name)
    assert caught.value.hint == f"for example `hardpoint plugin new {better}`"
    plugin.check_name(better)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_name_of_an_installed_platform_is_refused(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugin", "new", name]) == 2
    told = capsys.readouterr().err
    assert f"the platform {name!r} is installed already, by hardpoint-" in told
    assert not list(here.iterdir())


def test_auto_is_no_name() -> None:
    with pytest.raises(ConfigError, match="--device auto has a meaning of its own"):
        plugin.check_name("auto")


def test_a_package_in_the_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_hardpoint").mkdir()
    (tmp_path / "acme_hardpoint" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="a package 'acme_hardpoint' can be imported"):
        plugin.check_name("acme")


@pytest.mark.parametrize("kind", ["folder", "file", "dead link"])
def test_what_exists_is_left_alone(kind: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = here / "acme-hardpoint"
    if kind == "folder":
        there.mkdir()
    elif kind == "file":
        there.write_text("mine")
    else:
        there.symlink_to(here / "nowhere")
    assert main(["plugin", "new", "acme"]) == 2
    told = capsys.readouterr().err
    assert "acme-hardpoint exists already; nothing was written" in told
    assert "--into FOLDER" in told
    assert [path.name for path in here.iterdir()] == ["acme-hardpoint"]
    assert not there.is_dir() or not list(there.iterdir())


def test_a_place_that_cannot_be_written_is_refused(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write file/below: File exists"):
        plugin.write("acme", Path("file/below"))


def test_nothing_is_left_where_writing_stops_half_way(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Path.write_text

    def full(path: Path, text: str, **more: str) -> int:
        if path.name == "hardpoint.json":
            raise OSError(28, "No space left on device")
        return written(path, text, **more)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        plugin.write("acme", here / "acme")
    assert not list(here.iterdir())


def test_the_action_and_the_name_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin"]) == 2
    assert "new" in capsys.readouterr().err
    assert main(["plugin", "new"]) == 2
    assert "NAME" in capsys.readouterr().err


def test_the_manifest_has_no_other_name_in_it() -> None:
    assert json.loads(plugin.render("zeta")["zeta_hardpoint/hardpoint.json"])["name"] == "zeta"
    assert not [path for path, text in plugin.render("zeta").items() if "acme" in text.lower()]
