"""The platform `cuda` on machines without a usable GPU: each says in a line why, and touches none."""

from __future__ import annotations

import pytest
import torch
from hardpoint_cuda import platform
from hardpoint_cuda.driver import Gpu, list_gpus

from hardpoint_platforms.errors import DeviceUnavailable, PlatformError
from hardpoint_platforms.manifest import read_manifest
from hardpoint_platforms.options import validate_options

pytestmark = [pytest.mark.reference, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")]

H200 = Gpu("NVIDIA H200", 141 << 30, (9, 0))
OLD = Gpu("Tesla P100", 16 << 30, (6, 0))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    def there(*found: Gpu, reason: str = "") -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(platform, "list_gpus", lambda: (found, reason))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return there


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    found = platform.CudaPlatform().probe()
    assert found.devices == ()
    assert "was built without CUDA" in found.reasons[0]


def test_options_and_what_they_are_by_default() -> None:
    manifest = read_manifest("hardpoint_cuda", "cuda")
    checked = validate_options(manifest, {"record": "all"})
    assert checked.pop("record") == "all"
    assert checked == {"graphs": True, "largest_graph": 512, "fuse": False, "measure": False, "flashinfer": "auto"}
    assert validate_options(manifest, {})["record"] == "first"
    with pytest.raises(PlatformError, match="not one of first, all"):
        validate_options(manifest, {"record": "none"})


def test_no_driver() -> None:
    found, reason = list_gpus()
    assert found == ()
    assert "driver" in reason


def test_what_the_driver_says_is_told(gpus) -> None:
    gpus(reason="the NVIDIA driver does not answer")
    assert platform.CudaPlatform().probe().reasons == ("the NVIDIA driver does not answer",)


def test_an_old_gpu_is_left_out_with_the_reason(gpus) -> None:
    gpus(OLD, H200)
    found = platform.CudaPlatform().probe()
    assert [(device.index, device.name) for device in found.devices] == [(1, "NVIDIA H200")]
    assert found.reasons == ("Tesla P100 has compute capability 6.0, at least 8.0 is needed",)


@pytest.mark.parametrize(
    ("visible", "names"),
    [("1", ["b"]), ("1,0", ["b", "a"]), ("", []), ("0,7,1", ["a"]), ("-1", [])],
)
def test_visible_devices_are_numbered_as_torch_numbers_them(
    gpus, visible: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(Gpu("a", 1, (9, 0)), Gpu("b", 1, (9, 0)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = platform.CudaPlatform().probe()
    assert [device.name for device in found.devices] == names
    assert [device.index for device in found.devices] == list(range(len(names)))
    assert bool(found.reasons) == (not names)


def test_opening_what_is_not_there(gpus) -> None:
    gpus(H200)
    with pytest.raises(DeviceUnavailable, match="there is no cuda:3: there are 1 GPUs"):
        platform.CudaPlatform().open(3, {})
