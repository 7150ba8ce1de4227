"""Errors of the HIP runtime that end a device: told as such, with what to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hardpoint_torch_gpu.transfers import EventReadback

from hardpoint_platforms.device import DeviceInfo
from hardpoint_platforms.errors import DeviceLost

#: How torch begins what the runtime says; the second word in the test mode.
_RUNTIME = re.compile(r"^(?:HIP|CUDA) error: (.*)")


@contextmanager
def telling(info: DeviceInfo) -> Iterator[None]:
    """Where the host waits for the device: raises DeviceLost for an error of the runtime, whose state is gone then."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = _RUNTIME.match(str(error))
        if said is None:
            raise
        raise DeviceLost(
            f"{info} ({info.name}) has stopped: {said[1]}",
            hint="`dmesg | tail` has the driver's word; AMD_SERIALIZE_KERNEL=3 shows the kernel at fault; "
            f"`hardpoint conformance --device {info}` looks for it",
        ) from error


class TellingReadback(EventReadback):
    """A copy to the host that says when the device was lost."""

    def __init__(self, tensors: list[torch.Tensor], info: DeviceInfo) -> None:
        self._info = info
        super().__init__(tensors)

    def wait(self) -> tuple[torch.Tensor, ...]:
        with telling(self._info):
            return super().wait()
