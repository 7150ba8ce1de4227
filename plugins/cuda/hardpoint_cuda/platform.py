"""The platform `cuda`: finds NVIDIA GPUs without touching them, and opens one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from hardpoint_cuda.driver import list_gpus
from hardpoint_platforms.capabilities import Capabilities, ExecutionMode
from hardpoint_platforms.device import Device, DeviceInfo
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.platform import Platform, ProbeResult

#: Lowest compute capability that the kernels are written for: bf16 products (Ampere).
LOWEST = (8, 0)
#: GPUs on which the authors ran it.
_VERIFIED = ("H200",)


class CudaPlatform(Platform):
    """NVIDIA GPUs under a torch that was built for them."""

    def probe(self) -> ProbeResult:
        if torch.version.cuda is None:
            return ProbeResult(
                (), (f"torch {torch.__version__} was built without CUDA: install a CUDA build (pytorch.org)",)
            )
        gpus, why = list_gpus()
        visible = _visible(len(gpus))
        devices, reasons = [], [why] if why else []
        for index, physical in enumerate(visible):
            gpu = gpus[physical]
            if gpu.capability < LOWEST:
                reasons.append(
                    f"{gpu.name} has compute capability {_dotted(gpu.capability)}, at least {_dotted(LOWEST)} is needed"
                )
            else:
                devices.append(DeviceInfo("cuda", index, gpu.name, gpu.memory_bytes))
        if gpus and not visible:
            reasons.append(f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides every GPU")
        return ProbeResult(tuple(devices), tuple(reasons))

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        from hardpoint_cuda.device import CudaDevice

        found = self.probe()
        info = next((device for device in found.devices if device.index == index), None)
        if info is None:
            reasons = "; ".join(found.reasons) or f"there are {len(found.devices)} GPUs"
            raise DeviceUnavailable(f"there is no cuda:{index}: {reasons}", hint="`hardpoint doctor` lists them")
        try:
            torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            told = str(error).partition("\n")[0]
            raise DeviceUnavailable(
                f"cuda:{index} ({info.name}) cannot be used: {told}",
                hint="see nvidia-smi: the driver may be too old for this torch, or other processes hold the memory",
            ) from error
        return CudaDevice(info, _capabilities(info), options)


def _capabilities(info: DeviceInfo) -> Capabilities:
    return Capabilities(
        compute_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        step_tokens=8192,
        kv_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kv_as_computed=True,
        page_tokens=(16, 32, 64, 128, 8),
        mode=ExecutionMode.CAPTURE,
        verified=any(name in info.name for name in _VERIFIED),
    )


def _visible(count: int) -> list[int]:
    """Physical numbers of the GPUs that this process may use, in its order. Names by UUID are left to torch."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not count:
        return list(range(count))
    numbers = []
    for part in wanted.split(","):
        if not part.strip().isdigit() or int(part) >= count:
            break  # as the driver reads it: the first wrong entry ends the list
        numbers.append(int(part))
    return numbers


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@hookimpl
def hardpoint_platform() -> Platform:
    """Registered under the entry point `cuda`."""
    return CudaPlatform()
