"""What the platform finds without JAX, and what it says where it finds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hardpoint_tpu import platform
from hardpoint_tpu.chips import find_chips
from hardpoint_tpu.platform import NO_TPU, NO_TPU_BUT_GPU, TpuPlatform

from hardpoint_platforms.errors import DeviceUnavailable

pytestmark = pytest.mark.reference


def machine(root: Path, devices: list[tuple[str, str]], files: list[str]) -> Path:
    """A file system with PCI devices (vendor, device) and device files."""
    for number, (vendor, device) in enumerate(devices):
        folder = root / "sys/bus/pci/devices" / f"0000:00:{number:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    for name in files:
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def installed(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """All packages are there but `missing`, and no back end is asked for."""
    monkeypatch.setattr(platform, "find_spec", lambda name: None if name in missing else object())
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


@pytest.mark.parametrize(
    ("devices", "files", "names", "why"),
    [
        ([], [], [], "no TPU: no PCI device"),
        ([("0x8086", "0x0063")], [], [], "no TPU: no PCI device"),
        ([("0x1ae0", "0x0042")], ["accel0"], [], "though /dev has accel0"),
        ([("0x1ae0", "0x0063")], [], [], "neither /dev/accel* nor /dev/vfio/N"),
        ([("0x1ae0", "0x0063"), ("0x1ae0", "0x0063")], ["accel0", "accel1"], ["TPU v5e", "TPU v5e"], ""),
        ([("0x10de", "0x2330"), ("0x1ae0", "0x006f")], ["vfio/0", "vfio/vfio"], ["TPU v6e"], ""),
        ([("0x1ae0", "0x006f")], ["vfio/vfio"], [], "neither /dev/accel* nor /dev/vfio/N"),
    ],
)
def test_chips(tmp_path: Path, devices: list[tuple[str, str]], files: list[str], names: list[str], why: str) -> None:
    found, told = find_chips(machine(tmp_path, devices, files))
    assert found == names
    assert why in told
    assert bool(told) == (not names)


def test_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "jax", "torchax")
    (reason,) = TpuPlatform(tmp_path).probe().reasons
    assert "jax and torchax not installed: pip install 'jax==" in reason
    installed(monkeypatch)
    (reason,) = TpuPlatform(tmp_path).probe().reasons
    assert "JAX_PLATFORMS=cpu tries the plugin on the processor" in reason
    with pytest.raises(DeviceUnavailable, match="there is no tpu:0: no TPU"):
        TpuPlatform(tmp_path).open(0, {})


def test_a_chip_without_libtpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, [("0x1ae0", "0x0062")], ["accel0"])
    installed(monkeypatch, "libtpu")
    found = TpuPlatform(tmp_path).probe()
    assert not found.devices
    assert "1 TPU chips, but no libtpu: pip install 'libtpu==" in found.reasons[0]
    installed(monkeypatch)
    assert [str(info) + " " + info.name for info in TpuPlatform(tmp_path).probe().devices] == ["tpu:0 TPU v5p"]


@pytest.mark.parametrize(("wanted", "there"), [("cpu", True), ("CPU,tpu", True), ("tpu", False), ("", False)])
def test_the_processor_is_offered_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, there: bool
) -> None:
    installed(monkeypatch)
    monkeypatch.setenv("JAX_PLATFORMS", wanted)
    assert [info.name for info in TpuPlatform(tmp_path).probe().devices] == ([NO_TPU] if there else [])
    assert "no TPU" in NO_TPU


@pytest.mark.parametrize(
    ("gpus", "missing", "there", "why"),
    [
        (2, (), 2, ""),
        (0, (), 0, "lists no GPU"),
        (1, ("jax_cuda13_plugin",), 1, ""),
        (1, ("jax_cuda13_plugin", "jax_cuda12_plugin"), 0, "pip install 'jax[cuda13]"),
    ],
)
@pytest.mark.parametrize("wanted", ["cuda", "GPU,cpu"])
def test_gpus_are_offered_on_request(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    missing: tuple[str, ...],
    there: int,
    why: str,
    wanted: str,
) -> None:
    installed(monkeypatch, *missing)
    monkeypatch.setenv("JAX_PLATFORMS", wanted)
    for number in range(gpus):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    found = TpuPlatform(tmp_path).probe()
    assert [(info.name, info.stand_in) for info in found.devices] == [(NO_TPU_BUT_GPU, True)] * there
    assert why in " ".join(found.reasons)
    assert bool(why) != bool(there)


def test_probing_loads_no_jax() -> None:
    code = (
        "import sys; from hardpoint_tpu.platform import TpuPlatform; TpuPlatform().probe();"
        "print([name for name in ('jax', 'torchax', 'jaxlib') if name in sys.modules])"
    )
    path = str(Path(platform.__file__).parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_manifest_names_what_open_reads() -> None:
    manifest: dict[str, Any] = json.loads((Path(platform.__file__).parent / "hardpoint.json").read_text())
    assert manifest["name"] == "tpu"
    assert set(manifest["options_schema"]["properties"]) == {"memory_mib", "cache", "effort", "shapes", "growth"}
