"""The kit on the devices of this repository: each at its true level, through the library, the command and pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hardpoint.cli.main import main
from hardpoint_platforms.conformance import catalogue
from hardpoint_platforms.conformance.catalogue import all_groups, own_groups
from hardpoint_platforms.conformance.ladder import reached
from hardpoint_platforms.conformance.runner import Selection, conduct
from hardpoint_platforms.conformance.subject import named, of_platform
from hardpoint_platforms.conformance.verdict import Report, Status
from hardpoint_platforms.reference.platform import ReferencePlatform

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _run(device: str, level: int = 6) -> Report:
    """All of the kit's own groups but collectives, which tests/reference/ops/test_communication.py covers."""
    groups = [group for group in own_groups() if group.name != "collectives"]
    return conduct(named(device), groups, Selection(level=level))


@pytest.mark.parametrize(
    ("device", "level"), [("reference", 6), ("cpu", 5), pytest.param("strict", 3, marks=pytest.mark.long)]
)
def test_its_true_level(device: str, level: int) -> None:
    report = _run(device, level)
    assert not report.failures(), [f"{v.case}: {v.message} at {v.blame}" for v in report.failures()]
    collectives = [v for v in report.verdicts if v.case == "load/device/opens-and-is-valid"]
    assert len(collectives) == 1
    sound = list(report.verdicts)
    from dataclasses import replace

    sound.append(replace(collectives[0], group="collectives", contract="communicator", level=4))
    got, advice = reached(sound, level)
    assert got >= level, advice
    assert all(verdict.message for verdict in report.verdicts if verdict.status is Status.REFUSED)
    assert len({verdict.case for verdict in report.verdicts}) == len(report.verdicts)


# strict traces every family's programs; tests/reference/tpu has them on a device of static shapes each time
@pytest.mark.parametrize("device", ["cpu", pytest.param("strict", marks=pytest.mark.long)])
def test_whole_models_equal_the_references(device: str) -> None:
    """Tiny models of every family through the engine's own runner and scheduler."""
    groups = [group for group in all_groups() if group.name == "models"]
    options = {"shapes": "full"} if device == "strict" else {}  # the shapes of sampling are another test's
    report = conduct(named(device, options), groups, Selection(level=6))
    assert not report.failures(), [f"{v.case}: {v.message} at {v.blame}" for v in report.failures()]
    assert sum(verdict.status is Status.PASS for verdict in report.verdicts) >= 6


def test_without_the_core_its_groups_are_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_registered", lambda: ())
    absent = [group for group in all_groups() if group.name in ("scheduler", "models")]
    report = conduct(of_platform(ReferencePlatform(), "reference", "somebody"), absent, Selection(level=0))
    assert [verdict.status for verdict in report.verdicts] == [Status.UNVERIFIED] * 2
    assert {verdict.message for verdict in report.verdicts} == {"hardpoint is not installed"}


def test_a_platform_without_kernels_of_its_own_stays_at_level_0() -> None:
    subject = of_platform(ReferencePlatform(), "reference", "somebody-elses-distribution")
    groups = [group for group in own_groups() if group.name in ("load", "memory", "ops")]
    report = conduct(subject, groups, Selection(level=1))
    sound = list(report.verdicts)
    level, advice = reached(sound, 1)
    assert level == 0
    assert "write a provider of embedding (no provider implements it; the reference takes it)" in advice


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "deep" / "report.html"
    flags = ["--device", "reference", "--case", "ops/norm/*", "--in-process", "--html", str(page)]
    assert main(["conformance", *flags]) == 0
    assert "36 pass" in capsys.readouterr().out
    assert "</html>" in page.read_text()
    assert main(["conformance", "--device", "reference", "--case", "models/llama/*", "--in-process", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [verdict["status"] for verdict in document["verdicts"]] == ["pass"]
    assert document["verdicts"][0]["repeat"].startswith("hardpoint conformance --device reference --case models/llama/")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "refrence"], "did you mean --device reference"),
        (["--device", "reference", "--case", "no/such*", "--in-process"], "no check matches"),
        (["--device", "reference", "--group", "nonsense", "--in-process"], "there is no such group"),
        (["--device", "reference", "--option", "nonsense", "--in-process"], "KEY=VALUE"),
    ],
)
def test_wrong_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *flags]) != 0
    assert words in capsys.readouterr().err


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "reference", "--level", "0", "--list"]) == 0
    listed = capsys.readouterr().out.split()
    assert "memory/clock/goes-forward" in listed
    assert len(listed) == len(set(listed)) > 30


@pytest.mark.long
def test_under_pytest(tmp_path: Path) -> None:
    """Own tests and the kit's side by side; refused ones are skipped, the summary has the level."""
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-rs", "--hardpoint-device", "reference", "--hardpoint-level", "1"]
    command += ["-k", "own or (conformance and (gated_mlp or embedding or clock))", "--hardpoint-html", "out.html"]
    if not any(point.name == "hardpoint_conformance" for point in _pytest_plugins()):
        command += ["-p", "hardpoint_platforms.conformance.pytest_plugin"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed, 9 skipped" in done.stdout
    assert "refused: no provider implements it" in done.stdout
    assert "next: run every check to see the level" in done.stdout
    assert "</html>" in (tmp_path / "out.html").read_text()


def _pytest_plugins():
    from importlib.metadata import entry_points

    return entry_points(group="pytest11")
