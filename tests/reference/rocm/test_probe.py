"""The platform `rocm` out of the driver's files: what is found, and why something is not, with what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hardpoint_rocm import topology
from hardpoint_rocm.architectures import ARCHITECTURES, Float8, named
from hardpoint_rocm.platform import RocmPlatform
from hardpoint_rocm.topology import Places, list_gpus, visible

from hardpoint_platforms.errors import DeviceUnavailable, PlatformError
from hardpoint_platforms.manifest import Kind, read_manifest
from hardpoint_platforms.options import validate_options

pytestmark = pytest.mark.reference

MI300X, MI355X, RX7900, OLD = 90402, 90500, 110000, 90006
Machine = Callable[..., Places]


def test_a_torch_without_rocm(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    found = RocmPlatform(machine(MI300X)).probe()
    assert found.devices == ()
    assert "was built without ROCm: install a build for ROCm" in found.reasons[0]


def test_the_manifest_is_read_before_anything_else() -> None:
    manifest = read_manifest("hardpoint_rocm", "rocm")
    assert (manifest.vendor, manifest.kind) == ("AMD", Kind.ACCELERATOR)
    checked = validate_options(manifest, {"blas": "hipblaslt"})
    assert checked == {"graphs": True, "largest_graph": 512, "measure": False, "blas": "hipblaslt", "aiter": "off"}
    with pytest.raises(PlatformError, match="not one of auto, hipblaslt, hipblas"):
        validate_options(manifest, {"blas": "rocblas"})


def test_no_driver(hip: Any, tmp_path: Path) -> None:
    (reason,) = RocmPlatform(Places(tmp_path / "none", tmp_path)).probe().reasons
    assert "no AMD GPU driver is loaded" in reason


def test_a_driver_without_gpus(hip: Any, machine: Machine) -> None:
    assert RocmPlatform(machine()).probe().reasons == ("the AMD driver lists no GPU",)


def test_gpus_are_found_without_a_call_to_the_runtime(hip: Any, machine: Machine) -> None:
    found = RocmPlatform(machine(MI300X, MI355X)).probe()
    assert [(str(info), info.name, info.memory_bytes) for info in found.devices] == [
        ("rocm:0", "chip 0", 206141652992),
        ("rocm:1", "chip 1", 206141652992),
    ]
    assert found.reasons == ()
    assert hip.calls == []


def test_what_the_driver_says(machine: Machine) -> None:
    (gpu, _), reason = list_gpus(machine(MI300X, RX7900))
    assert (gpu.architecture, gpu.wave, gpu.lds_bytes, gpu.uuid) == ("gfx942", 64, 65536, "GPU-000000000000abc0")
    assert reason == ""


def test_a_board_without_a_name_is_called_by_its_architecture(machine: Machine) -> None:
    places = machine(RX7900)
    (places.system / "drm" / "renderD128" / "device" / "product_name").unlink()
    assert list_gpus(places)[0][0].name == "AMD gfx1100 (Radeon RX 7900, PRO W7800, W7900)"


def test_another_architecture_is_left_out_with_the_reason(hip: Any, machine: Machine) -> None:
    found = RocmPlatform(machine(OLD, MI300X)).probe()
    assert [device.index for device in found.devices] == [1]
    assert found.reasons == (
        "chip 0 has architecture gfx906, the kernels are compiled for gfx90a, gfx942, gfx950, gfx1100, gfx1201",
    )


@pytest.mark.parametrize("file", ["kfd", "dri/renderD128"])
def test_a_file_that_may_not_be_opened(hip: Any, machine: Machine, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = machine(MI300X)
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != places.devices / file and allowed(path, mode))
    monkeypatch.setattr(topology, "_group", lambda path: "render")
    found = RocmPlatform(places).probe()
    assert found.devices == ()
    assert f"/dev/{file} may not be opened: it belongs to group 'render'" in found.reasons[0]
    assert "usermod -aG render" in found.reasons[0]


def test_a_container_without_the_file(hip: Any, machine: Machine) -> None:
    places = machine(MI300X)
    (places.devices / "kfd").unlink()
    assert "--device=/dev/kfd" in RocmPlatform(places).probe().reasons[0]


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, ["chip 0", "chip 1", "chip 2"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["chip 1"]),
        ({"HIP_VISIBLE_DEVICES": "2, 0"}, ["chip 2", "chip 0"]),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, ["chip 0"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["chip 1"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, ["chip 2"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["chip 2"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000ABC1"}, ["chip 1"]),
    ],
)
def test_visible_devices_are_numbered_as_the_runtime_numbers_them(
    machine: Machine, environment: dict[str, str], names: list[str]
) -> None:
    gpus, hidden = visible(list_gpus(machine(MI300X, MI300X, MI300X))[0], environment)
    assert [gpu.name for gpu in gpus] == names
    assert hidden == ""


@pytest.mark.parametrize("variable", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
@pytest.mark.parametrize("value", ["", "-1", "9"])
def test_all_hidden(hip: Any, machine: Machine, variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = machine(MI300X)
    monkeypatch.setenv(variable, value)
    assert RocmPlatform(places).probe().reasons == (f"{variable}={value!r} hides every GPU",)


def test_opening_what_is_not_there(hip: Any, machine: Machine) -> None:
    with pytest.raises(DeviceUnavailable, match="there is no rocm:3: there are 1 GPUs"):
        RocmPlatform(machine(MI300X)).open(3, {})


@pytest.mark.parametrize(
    ("version", "name"),
    [(90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (110000, "gfx1100"), (120001, "gfx1201")],
)
def test_the_drivers_number_of_every_architecture(version: int, name: str) -> None:
    assert named(version) == name
    assert name in ARCHITECTURES


def test_facts_of_the_architectures() -> None:
    kinds = {name: chip.float8 for name, chip in ARCHITECTURES.items()}
    assert kinds == {
        "gfx90a": Float8.NONE,
        "gfx942": Float8.FNUZ,
        "gfx950": Float8.OCP,
        "gfx1100": Float8.NONE,
        "gfx1201": Float8.OCP,
    }
    assert {name: (chip.wave, chip.lds_bytes >> 10) for name, chip in ARCHITECTURES.items()} == {
        "gfx90a": (64, 64), "gfx942": (64, 64), "gfx950": (64, 160), "gfx1100": (32, 64), "gfx1201": (32, 64)
    }  # fmt: skip
