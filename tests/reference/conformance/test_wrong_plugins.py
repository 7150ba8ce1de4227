"""Wrong plugins, installed as distributions: named by distribution, contract and line, and the kit goes on."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hardpoint_platforms.conformance.command import main

pytestmark = pytest.mark.reference

PLATFORM = """
import time
import torch
from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_platforms.versioning import Version

INFO = DeviceInfo("acme", 0, "a fake chip")


class Linear(OpProvider):
    name, op, version = "acme linear", "linear", Version(1, 0)

    def supports(self, instance):
        return Support(instance.dtype is torch.float32, "acme unit")

    def build(self, instance):
        def kernel(x, w):
            return torch.nn.functional.linear(x, *w)
        return kernel


class FakeDevice(Device):
    info = INFO
    torch_device = torch.device("cpu")

    def capabilities(self):
        return Capabilities(unified_memory=True)

    def memory(self):
        return MemoryInfo(1 << 30, 1 << 30)

    def synchronize(self):
        return None

    def providers(self):
        return (Linear(),)


class FakePlatform(Platform):
    def probe(self):
        return ProbeResult((INFO,))

    def open(self, index, options):
        if index:
            from hardpoint_platforms.errors import DeviceUnavailable
            raise DeviceUnavailable("only acme:0")
        return FakeDevice()


@hookimpl
def hardpoint_platform():
    return FakePlatform()
"""
MANIFEST = {
    "manifest": "1.0", "name": "acme", "vendor": "Acme", "kind": "accelerator", "priority": 50,
    "interfaces": {"platform": "1.0", "device": "1.0"},
}  # fmt: skip
KERNEL = "            return torch.nn.functional.linear(x, *w)"


def install(folder: Path, *changes: tuple[str, str]) -> Path:
    """A distribution acme-npu 1.2 whose platform is PLATFORM with pieces replaced."""
    code = PLATFORM
    for old, new in changes:
        assert old in code, old
        code = code.replace(old, new)
    package = folder / "acme_npu"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "platform.py").write_text(code)
    (package / "hardpoint.json").write_text(json.dumps(MANIFEST))
    info = folder / "acme_npu-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-npu\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[hardpoint.platforms]\nacme = acme_npu.platform\n")
    return folder


@pytest.fixture
def kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, dict[str, Any], str]]]:
    """kit(*flags) -> exit code, report, stderr: the kit's command on what is installed in tmp_path."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    importlib.invalidate_caches()

    def run(*flags: str, apart: bool = False) -> tuple[int, dict[str, Any], str]:
        code = main(["--device", "acme", "--json", *flags, *([] if apart else ["--in-process"])])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out.startswith("{") else {}, said.err

    yield run
    for module in [name for name in sys.modules if name.partition(".")[0] == "acme_npu"]:
        del sys.modules[module]


def failures(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdicts that failed."""
    return [verdict for verdict in report["verdicts"] if verdict["status"] == "fail"]


def line_of(folder: Path, text: str) -> str:
    path = folder / "acme_npu" / "platform.py"
    lines = path.read_text().splitlines()
    return f"{path}:{next(number for number, line in enumerate(lines, 1) if text in line)} "


def test_the_sound_plugin_is_at_level_0(tmp_path: Path, kit: Any) -> None:
    install(tmp_path)
    _, report, _ = kit("--level", "1", "--group", "load", "--group", "ops")
    assert failures(report) == []
    passed = [verdict for verdict in report["verdicts"] if verdict["status"] == "pass"]
    assert {verdict["contract"] for verdict in passed} >= {"linear", "manifest", "imports", "probe", "device"}
    refused = next(verdict for verdict in report["verdicts"] if verdict["contract"] == "norm")
    assert (refused["status"], refused["message"]) == ("refused", "no provider implements it; the reference takes it")


@pytest.mark.parametrize(
    ("change", "words", "at"),
    [
        ((KERNEL, "            return torch.nn.functional.linear(x, *w).double()"), "float64", "def kernel"),
        ((KERNEL, "            raise RuntimeError('unit 3 is on fire')"), "unit 3 is on fire", "unit 3 is on fire"),
        ((KERNEL, "            return x @ w[0]"), "RuntimeError", "return x @ w[0]"),
        ((KERNEL, "            time.sleep(30)  # stuck"), "hangs", "time.sleep(30)  # stuck"),
        ((KERNEL, "            raise SystemExit(3)"), "SystemExit: 3", "raise SystemExit(3)"),
        (("def kernel(x, w):", "def kernel(x):"), "TypeError", ""),
        (('torch.float32, "acme unit")', 'False)'), "without a reason", "def supports"),
        (("return Support(instance.dtype is torch.float32, \"acme unit\")", "return True"), "not a Support",
         "def supports"),
    ],
    ids=["wrong dtype", "exception", "wrong shape", "hang", "exit", "wrong kernel signature", "no reason", "bool"],
)  # fmt: skip
def test_a_wrong_kernel_is_named(tmp_path: Path, kit: Any, change: tuple[str, str], words: str, at: str) -> None:
    folder = install(tmp_path, change)
    code, report, said = kit("--group", "ops", "--case", "ops/linear/*x48*", "--case", "ops/norm/*", "--timeout", "3")
    assert code == 1, said
    found = failures(report)
    assert found
    assert {verdict["contract"] for verdict in found} == {"linear"}
    assert found[0]["message"].startswith("acme-npu 1.2: linear ")
    assert words in found[0]["message"]
    if at:
        assert found[0]["blame"].startswith(line_of(folder, at))
    assert "--device acme --case ops/linear/" in found[0]["repeat"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("    def synchronize(self):\n        return None\n", ""), "synchronize"),
        (("def memory(self)", "def memory(self, unit)"), "FakeDevice.memory(self, unit) cannot take the core's call"),
        (("return FakeDevice()", "return None"), "not a Device"),
        (("return (Linear(),)", "return (None,)"), "not an OpProvider"),
        (("return FakeDevice()", "raise OSError('no driver')"), "no driver"),
    ],
    ids=["missing method", "wrong signature", "no device", "no provider", "open raises"],
)
def test_a_device_that_cannot_be_used_is_named(tmp_path: Path, kit: Any, change: tuple[str, str], words: str) -> None:
    install(tmp_path, change)
    code, report, said = kit("--level", "1", "--case", "[!l]*", "--case", "load/[!i]*")
    assert code == 1, said
    found = failures(report)
    assert any(words in verdict["message"] for verdict in found), [verdict["message"] for verdict in found]
    assert all("acme-npu 1.2" in verdict["message"] for verdict in found)


def test_a_plugin_that_cannot_be_imported_is_named_with_its_line(tmp_path: Path, kit: Any) -> None:
    folder = install(tmp_path, ("import time", "import no_such_driver  # here"))
    code, _, said = kit()
    assert code == 2
    assert "acme-npu 1.2" in said
    assert line_of(folder, "import no_such_driver").strip() in said
    assert "Traceback" not in said


def test_a_device_that_hangs_while_it_opens(tmp_path: Path, kit: Any) -> None:
    folder = install(tmp_path, ("return FakeDevice()", "time.sleep(60)  # stuck"))
    code, report, said = kit("--level", "1", "--timeout", "0.5")
    assert code == 1, said
    found = failures(report)
    assert "hangs" in found[0]["message"]
    assert any(verdict["blame"].startswith(line_of(folder, "time.sleep(60)")) for verdict in found)


def test_a_plugin_that_patches_the_spi_or_imports_the_core(tmp_path: Path, kit: Any) -> None:
    patch = "import time\nimport hardpoint.errors\nfrom hardpoint_platforms.binding import OpTable\n"
    patch += "if __import__('sys').argv[0].endswith('picture.py'): OpTable.bind = lambda self, i: None"
    install(tmp_path, ("import time", patch))
    _, report, _ = kit("--case", "load/imports/nothing*")
    (found,) = failures(report)
    assert "imports hardpoint" in found["message"]
    assert "OpTable.bind" in found["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("unified_memory=True", "functional_state=True, unified_memory=True"), "functional_state is True"),
        (("unified_memory=True", "kv_dtypes=(), unified_memory=True"), "kv_dtypes"),
        (("MemoryInfo(1 << 30, 1 << 30)", "MemoryInfo(1 << 31, 1 << 30)"), "bytes free of"),
        (("unified_memory=True", "host_tensors=True"), "host_tensors is True and unified_memory False"),
    ],
    ids=["functional", "no kv dtype", "memory", "host tensors"],
)
def test_lies_about_capabilities(tmp_path: Path, kit: Any, change: tuple[str, str], words: str) -> None:
    install(tmp_path, change)
    _, report, _ = kit(
        "--case",
        "load/[!i]*",
        "--case",
        "state/*",
        "--case",
        "memory/*/free*",
        "--case",
        "memory/*/*place",
        "--case",
        "*setup*",
    )
    assert any(words in verdict["message"] for verdict in failures(report))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("            import ctypes; ctypes.string_at(0)", "the process died of SIGSEGV"),
        ("            import os; os._exit(9)", "the process ended with exit code 9"),
    ],
    ids=["crash", "exit"],
)
def test_a_process_that_is_lost_is_a_verdict_and_the_rest_runs(tmp_path: Path, kit: Any, body: str, words: str) -> None:
    install(tmp_path, (KERNEL, f"            if w[0].shape[1] == 33:\n    {body}\n{KERNEL}"))
    code, report, said = kit("--case", "ops/linear/*", "--case", "load/probe/*", apart=True)
    assert code == 1, said
    (found,) = failures(report)
    assert found["case"] == "ops/linear/3x33-to-17/float32"
    assert found["message"] == f"acme-npu 1.2: linear {words}"
    if "SIGSEGV" in words:
        assert found["blame"].startswith(line_of(tmp_path, "string_at(0)"))
    assert report["counts"]["pass"] == 5
    assert report["device"] == "acme:0"


@pytest.mark.long
def test_processes_that_share_the_device_give_the_verdicts_of_one(tmp_path: Path, kit: Any) -> None:
    install(
        tmp_path, (KERNEL, f"            if w[0].shape[1] == 33:\n                import os; os._exit(9)\n{KERNEL}")
    )
    asked = ("--case", "ops/linear/*", "--case", "load/probe/*", "--case", "memory/account*")
    reports = [kit(*asked, "--jobs", jobs, apart=True)[1] for jobs in ("1", "3")]
    told = [[(v["case"], v["status"], v["message"]) for v in report["verdicts"]] for report in reports]
    assert told[0] == told[1]
    assert {group for group, _, _ in (case.partition("/") for case, _, _ in told[0])} >= {"ops", "load"}
    assert [message for _, status, message in told[1] if status == "fail"] == [
        "acme-npu 1.2: linear the process ended with exit code 9"
    ]


def test_a_plugin_that_cannot_be_imported_in_another_process(tmp_path: Path, kit: Any) -> None:
    install(tmp_path, ("import time", "import no_such_driver"))
    code, _, said = kit(apart=True)
    assert code == 2
    assert "acme-npu 1.2" in said
    assert "platform.py:2" in said


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_when_the_time_is_over_the_rest_is_unverified(tmp_path: Path, kit: Any, jobs: str) -> None:
    install(tmp_path)
    _, report, _ = kit("--case", "ops/linear/*", "--within", "0", "--jobs", jobs, apart=True)
    assert report["verdicts"]
    assert {(v["status"], v["message"]) for v in report["verdicts"]} == {
        ("unverified", "not run: the time of --within was over")
    }
