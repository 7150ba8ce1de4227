"""Triton's interpreter, as for the tests of what GPU plugins share; torch as built for AMD, and a driver's files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_BESIDE = Path(__file__).resolve().parents[1] / "torch_gpu" / "conftest.py"
_spec = importlib.util.spec_from_file_location("triton_on_the_host", _BESIDE)
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))
sys.path.insert(0, str(Path(__file__).parent))  # what the tests here share


class HipSurface:
    """torch as a build for ROCm shows itself, on a machine without a GPU: names under `torch.cuda` that answer.

    Each call is kept in `calls`; `failing[name]` is raised instead of an answer. No torch for ROCm can be installed
    here: texts of errors are those of HIP's `hipGetErrorString` and of torch's own sources.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}
        patch.setattr(torch.version, "hip", "7.0.51831")
        patch.setattr(torch.version, "cuda", None)
        answers: dict[str, Any] = {
            "device_count": 1,
            "mem_get_info": (190 << 30, 192 << 30),
            "memory_reserved": 0,
            "memory_allocated": 0,
            "set_device": None,
            "current_device": 0,
            "synchronize": None,
            "empty_cache": None,
            "graph_pool_handle": (0, 1),
            "get_device_name": "AMD Instinct MI300X",
            "get_device_capability": (9, 4),
            "current_stream": SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None),
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, self._call(name, answer))
        stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=self._call("stream.synchronize", None))
        patch.setattr(torch.cuda, "Stream", lambda *args, **named: stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        event = SimpleNamespace(record=self._call("event.record", None), synchronize=self._call("event.wait", None))
        patch.setattr(torch.cuda, "Event", lambda *args, **named: event)
        graph = SimpleNamespace(
            capture_begin=self._call("capture_begin", None),
            capture_end=self._call("capture_end", None),
            replay=self._call("replay", None),
            reset=self._call("reset", None),
        )
        patch.setattr(torch.cuda, "CUDAGraph", lambda *args, **named: graph)

    def _call(self, name: str, answer: Any) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.calls.append(name)
            if name in self.failing:
                raise self.failing[name]
            return answer

        return call


@pytest.fixture
def hip(monkeypatch: pytest.MonkeyPatch) -> HipSurface:
    """torch as on an AMD machine, until the test ends."""
    return HipSurface(monkeypatch)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """machine(*versions) writes the driver's files of a host with a CPU and these GPUs; returns where they are."""
    from hardpoint_rocm.topology import Places

    for variable in (
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES",
        "HARDPOINT_ROCM_ASSUME_HIP",
    ):
        monkeypatch.delenv(variable, raising=False)
    places = Places(tmp_path / "class", tmp_path / "dev")

    def write(path: Path, text: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def make(*versions: int) -> Places:
        write(places.nodes / "0" / "properties", "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n")
        write(places.devices / "kfd")
        for number, version in enumerate(versions):
            node, render = places.nodes / str(number + 1), 128 + number
            write(
                node / "properties",
                f"cpu_cores_count 0\nsimd_count 1216\nlds_size_in_kb 64\nwave_front_size 64\nvendor_id 4098\n"
                f"gfx_target_version {version}\ndrm_render_minor {render}\nunique_id {0xABC0 + number}\n",
            )
            write(node / "mem_banks" / "0" / "properties", "heap_type 1\nsize_in_bytes 206141652992\n")
            write(node / "mem_banks" / "1" / "properties", "heap_type 0\nsize_in_bytes 1000\n")
            write(places.devices / "dri" / f"renderD{render}")
            write(places.system / "drm" / f"renderD{render}" / "device" / "product_name", f"chip {number}\n")
        return places

    return make
