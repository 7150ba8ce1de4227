"""What NVIDIA's management library says, without a context on any GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_NAMES = ("libnvidia-ml.so.1", "nvml.dll")


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver lists it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def list_gpus() -> tuple[tuple[Gpu, ...], str]:
    """All GPUs of this machine, or none and the reason. Respects no CUDA_VISIBLE_DEVICES."""
    library = _load()
    if library is None:
        return (), "no NVIDIA driver is installed (libnvidia-ml is not there)"
    if code := library.nvmlInit_v2():
        return (), f"the NVIDIA driver does not answer (nvmlInit gives {code}); see nvidia-smi"
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = tuple(_describe(library, index) for index in range(count.value))
        return found, "" if found else "the NVIDIA driver lists no GPU"
    finally:
        library.nvmlShutdown()


def _load() -> ctypes.CDLL | None:
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _describe(library: ctypes.CDLL, index: int) -> Gpu:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    library.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(name.value.decode(errors="replace"), memory.total, (major.value, minor.value))
