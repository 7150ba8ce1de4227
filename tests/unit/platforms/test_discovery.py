"""Discovery without importing: what is found, and what is said against it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import DeviceUnavailable, PluginError


def problem(name: str = "acme") -> PluginError:
    found = discover().entries[name].problem
    assert found is not None
    return found


def test_a_plugin_is_found_and_not_imported(plugins) -> None:
    plugins.add(code="raise RuntimeError('imported')")
    entry = discover().entries["acme"]
    assert (entry.distribution, entry.version, entry.problem) == ("acme-hardpoint", "1.2", None)
    assert entry.manifest.priority == 50
    assert "acme_hardpoint" not in sys.modules


def test_the_built_in_ones_are_there() -> None:
    entries = discover().entries
    assert entries["reference"].manifest.kind.value == "test"
    assert entries["reference"].problem is None
    assert entries["cpu"].manifest.kind.value == "host"
    assert entries["cpu"].problem is None


def test_discovery_needs_no_torch() -> None:
    code = "import sys; from hardpoint_platforms.discovery import discover; discover(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("interfaces", "said", "mend"),
    [
        ({"device": "0.9"}, "it speaks device 0.9, this release offers 1.0", "upgrade acme-hardpoint"),
        ({"device": "99.0"}, "it speaks device 99.0, this release offers 1.0", "upgrade hardpoint-platforms"),
        ({"device": "1.4-1.6"}, "it speaks device 1.4-1.6", "upgrade hardpoint-platforms"),
        ({"ops": "2.0"}, "it speaks ops 2.0", "upgrade hardpoint-platforms"),
        ({"platform": "0.1-0.7", "device": "99.0"}, "it speaks platform 0.1-0.7", "upgrade acme-hardpoint"),
    ],
)
def test_another_interface_version_gives_both_ranges_and_the_command(plugins, interfaces, said, mend) -> None:
    plugins.add(interfaces={"platform": "1.0", "device": "1.0"} | interfaces)
    error = problem()
    assert error.cause == "version"
    assert said in error.message
    assert "acme-hardpoint 1.2" in error.message
    assert f"pip install --{mend}" in error.hint


def test_ranges_that_fit_are_taken(plugins) -> None:
    plugins.add(interfaces={"platform": "1.0", "device": "0.4-1.0", "ops": "1.0-1.7", "a-later-interface": "3.0"})
    assert discover().entries["acme"].problem is None


def test_required_interfaces_must_be_stated(plugins) -> None:
    plugins.add(interfaces={"platform": "1.0"})
    assert problem().cause == "manifest"
    assert "interface versions of device" in problem().message


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"manifest": "1.0"}'])
def test_a_missing_or_broken_manifest(plugins, manifest) -> None:
    plugins.add(manifest=manifest)
    assert problem().cause == "manifest"
    assert "hardpoint.json" in problem().message
    assert problem().hint


def test_a_manifest_of_a_later_format(plugins) -> None:
    plugins.add(manifest={"manifest": "7.0"})
    assert problem().cause == "version"
    assert "format 7.0, this release reads 1.0" in problem().message


def test_a_package_that_is_gone(plugins) -> None:
    plugins.add(value="no_such_package.platform:thing")
    assert problem().cause == "import"
    assert "'no_such_package' is not there" in problem().message
    assert "pip install --force-reinstall acme-hardpoint" in problem().hint


@pytest.mark.parametrize(
    ("requires", "said", "mend"),
    [
        ("no-such-runtime>=2", "needs no-such-runtime>=2, it is not installed", "pip install 'no-such-runtime>=2'"),
        ("numpy<1", "needs numpy<1, numpy", "pip install 'numpy<1'"),
        ("hardpoint<0.1", "needs hardpoint<0.1, hardpoint 0.1.0 is installed", "--upgrade acme-hardpoint"),
        ("hardpoint-platforms>=99", "needs hardpoint-platforms>=99", "--upgrade acme-hardpoint"),
    ],
)
def test_unmet_requirements_of_the_distribution(plugins, requires, said, mend) -> None:
    plugins.add(requires=("numpy", requires))
    assert problem().cause == "dependency"
    assert said in problem().message
    assert mend in problem().hint


def test_markers_and_extras_are_evaluated(plugins) -> None:
    plugins.add(
        requires=(
            "no-such-a; python_version < '3'",
            "no-such-b; extra == 'docs'",
            "numpy>=1; python_version >= '3'",
            "packaging[nothing]",
        )
    )
    assert discover().entries["acme"].problem is None


def test_requirements_of_the_manifest_may_be_import_names(plugins) -> None:
    plugins.add(name="fine", kind="host")
    plugins.add(name="poor", kind="host", manifest={
        "manifest": "1.0", "name": "poor", "kind": "host", "requires": ["json", "no_such_runtime"],
        "interfaces": {"platform": "1.0", "device": "1.0"},
    })  # fmt: skip
    assert discover().entries["fine"].problem is None
    assert problem("poor").cause == "dependency"
    assert "no_such_runtime" in problem("poor").message
    assert "json" not in problem("poor").message


def test_two_distributions_with_one_name_break_that_name_only(plugins) -> None:
    plugins.add(distribution="acme-one")
    plugins.add(distribution="acme-two", version="3.0")
    plugins.add(name="other")
    registry = discover()
    error = registry.entries["acme"].problem
    assert error.cause == "conflict"
    assert "acme-one 1.2 and acme-two 3.0 both claim this name" in error.message
    assert "pip uninstall acme-one" in error.hint
    assert registry.entries["other"].problem is None


def test_a_distribution_seen_twice_counts_once(plugins, tmp_path, monkeypatch) -> None:
    plugins.add()
    later = tmp_path / "later" / "acme_hardpoint-0.1.dist-info"
    later.mkdir(parents=True)
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme.Hardpoint\nVersion: 0.1\n")
    (later / "entry_points.txt").write_text("[hardpoint.platforms]\nacme = acme_hardpoint.platform\n")
    monkeypatch.syspath_prepend(tmp_path / "later")
    monkeypatch.syspath_prepend(tmp_path)
    entry = discover().entries["acme"]
    assert (entry.version, entry.problem) == ("1.2", None)


def test_broken_metadata_of_others_does_no_harm(plugins, tmp_path) -> None:
    plugins.add()
    for name, files in {
        "empty": {},
        "binary": {"METADATA": b"\xff\xfe\x00"},
        "lines": {"entry_points.txt": b"= ["},
    }.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
    assert discover().entries["acme"].problem is None


def test_an_unknown_name_lists_what_there_is(plugins) -> None:
    plugins.add()
    with pytest.raises(DeviceUnavailable) as caught:
        discover().load("acne")
    assert "'acne'" in str(caught.value)
    assert "acme, cpu, reference, sim" in str(caught.value)
    assert "did you mean --device acme?" in str(caught.value)
