"""The platform `rocm`: finds AMD GPUs without touching them, and opens one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from hardpoint_platforms.capabilities import Capabilities, ExecutionMode, TuningChoice
from hardpoint_platforms.device import Device, DeviceInfo
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_rocm import assumed
from hardpoint_rocm.architectures import ARCHITECTURES, Architecture
from hardpoint_rocm.topology import Gpu, Places, list_gpus, refusal, visible

#: How torch calls the libraries of matrix products: by NVIDIA's names too.
_LIBRARIES = {"Cublas": "hipblas", "Cublaslt": "hipblaslt", "Ck": "ck"}


class RocmPlatform(Platform):
    """AMD GPUs under a torch that was built for them. `places`: where the driver's files are."""

    def __init__(self, places: Places | None = None) -> None:
        self._places = places or Places()

    def probe(self) -> ProbeResult:
        if assumed.wanted():
            why = assumed.refusal()
            return ProbeResult((), (why,)) if why else ProbeResult(assumed.devices())
        found, reasons = self._usable()
        return ProbeResult(tuple(info for info, _ in found), reasons)

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        from hardpoint_rocm.device import RocmDevice

        found = self.probe()
        info = next((device for device in found.devices if device.index == index), None)
        if info is None:
            reasons = "; ".join(found.reasons) or f"there are {len(found.devices)} GPUs"
            raise DeviceUnavailable(f"there is no rocm:{index}: {reasons}", hint="`hardpoint doctor` lists them")
        try:
            torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            told = str(error).partition("\n")[0]
            raise DeviceUnavailable(
                f"rocm:{index} ({info.name}) cannot be used: {told}",
                hint="see rocminfo and amd-smi: the driver may be too old for this torch, which was built for ROCm "
                f"{torch.version.hip}, or other processes hold the memory",
            ) from error
        architecture = assumed.architecture(index) if assumed.wanted() else self._architecture(info)
        if options.get("blas", "auto") != "auto":
            torch.backends.cuda.preferred_blas_library(options["blas"])
        return RocmDevice(info, _capabilities(architecture), options, architecture)

    def _usable(self) -> tuple[list[tuple[DeviceInfo, Gpu]], tuple[str, ...]]:
        """Devices by their index in torch, and why others are none."""
        if torch.version.hip is None:
            told = 'install a build for ROCm (pytorch.org, "Get started", compute platform ROCm)'
            return [], (f"torch {torch.__version__} was built without ROCm: {told}",)
        gpus, why = list_gpus(self._places)
        why = why or refusal(self._places)
        if why:
            return [], (why,)
        seen, hidden_by = visible(gpus, os.environ)
        devices, reasons = [], []
        for index, gpu in enumerate(seen):
            if gpu.architecture not in ARCHITECTURES:
                known = ", ".join(ARCHITECTURES)
                reasons.append(f"{gpu.name} has architecture {gpu.architecture}, the kernels are compiled for {known}")
            elif against := refusal(self._places, gpu):
                reasons.append(f"{gpu.name}: {against}")
            else:
                devices.append((DeviceInfo("rocm", index, gpu.name, gpu.memory_bytes), gpu))
        if hidden_by:
            reasons.append(f"{hidden_by} hides every GPU")
        return devices, tuple(reasons)

    def _architecture(self, info: DeviceInfo) -> Architecture:
        found, _ = self._usable()
        return next(ARCHITECTURES[gpu.architecture] for device, gpu in found if device.index == info.index)


def _capabilities(architecture: Architecture) -> Capabilities:
    return Capabilities(
        compute_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        step_tokens=8192,
        kv_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kv_as_computed=True,
        page_tokens=(16, 32, 64, 128, 8),
        mode=ExecutionMode.CAPTURE,
        tuning=_tuning(architecture),
        verified=False,  # not run on real hardware: its authors have none
    )


def _tuning(architecture: Architecture) -> tuple[TuningChoice, ...]:
    chip, float8 = architecture, architecture.float8
    facts = f"waves of {chip.wave}, {chip.matrix} instructions, 8-bit floats: {float8.value}"
    if assumed.wanted():
        facts = f"{assumed.VARIABLE}: {chip.chips} passes for an AMD GPU, which says nothing of one"
    return (
        TuningChoice("architecture", chip.name, facts),
        TuningChoice(
            "matrix products",
            _library(),
            "torch's choice; `--option blas=hipblaslt` (or hipblas), TORCH_BLAS_PREFER_HIPBLASLT=1 overrule it",
        ),
    )


def _library() -> str:
    """The library that torch multiplies large matrices with."""
    said = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
    return _LIBRARIES.get(said, said.lower())


@hookimpl
def hardpoint_platform() -> Platform:
    """Registered under the entry point `rocm`."""
    return RocmPlatform()
