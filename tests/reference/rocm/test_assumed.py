"""The test mode in which an NVIDIA GPU passes for an AMD one: asked for by a variable, refused to all that serves."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hardpoint_rocm import assumed
from hardpoint_rocm.architectures import Float8
from hardpoint_rocm.platform import RocmPlatform

from hardpoint_platforms.errors import DeviceUnavailable

pytestmark = pytest.mark.reference

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as on a machine with two H200."""
    monkeypatch.setenv(assumed.VARIABLE, "1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, answer in (("device_count", 2), ("get_device_name", "NVIDIA H200"), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)


@pytest.mark.parametrize(("value", "asked"), [("1", True), ("0", False), ("", False)])
def test_it_is_asked_for_by_name(value: str, asked: bool) -> None:
    assert assumed.wanted({assumed.VARIABLE: value}) is asked
    assert not assumed.wanted({})


def test_tests_are_granted_it(nvidia: None) -> None:
    assert assumed.refusal({}, {"pytest"}) == ""
    assert assumed.refusal({}, {"hardpoint_platforms.conformance.subject"}) == ""
    assert assumed.refusal({"PYTEST_CURRENT_TEST": "x (call)"}, set()) == ""
    assert [str(info) for info in RocmPlatform().probe().devices] == ["rocm:0", "rocm:1"]


def test_a_server_is_not(nvidia: None) -> None:
    why = assumed.refusal({}, {"hardpoint.server", "hardpoint_platforms.conformance.ladder"})
    assert why.startswith("HARDPOINT_ROCM_ASSUME_HIP is a test mode: it works under pytest and `hardpoint conformance`")


def test_a_process_of_its_own_is_refused() -> None:
    """With nothing of a test around it, whatever GPU there is."""
    code = (
        "from hardpoint_rocm.platform import RocmPlatform; p = RocmPlatform(); print(p.probe().reasons); p.open(0, {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(PLUGINS / "rocm"), assumed.VARIABLE: "1"},
        check=False,
    )
    assert done.returncode == 1
    assert "is a test mode" in done.stdout
    assert "DeviceUnavailable: there is no rocm:0: HARDPOINT_ROCM_ASSUME_HIP is a test mode" in done.stderr


def test_a_torch_for_another_vendor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(assumed.VARIABLE, "1")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceUnavailable, match="wants a torch for NVIDIA GPUs"):
        RocmPlatform().open(0, {})


def test_it_says_so_aloud(nvidia: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from hardpoint_rocm import device, platform

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1, 2))
    monkeypatch.setattr(device, "RocmDevice", lambda *given: SimpleNamespace(given=given))
    with caplog.at_level(logging.WARNING):
        _, capabilities, _, chip = platform.RocmPlatform().open(1, {}).given
    assert "NVIDIA H200 passes for an AMD GPU. A test mode" in caplog.text
    assert (chip.name, chip.float8) == ("assumed", Float8.OCP)
    assert not capabilities.verified
    assert any("passes for an AMD GPU" in choice.reason for choice in capabilities.tuning)
