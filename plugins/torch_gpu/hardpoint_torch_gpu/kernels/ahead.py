"""Kernels that start while the one before them ends, where the hardware can (NVIDIA's programmatic dependent launch).

Such a kernel may read weights and what a step got from the host before `after_others`; everything else behind it. It
lets the next one start only then, so that before its own wait the next one finds all but its predecessor done.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton built without NVIDIA's part, where no kernel comes to call them
    gdc_launch_dependents = gdc_wait = None

#: Lowest compute capability that has it.
_HOPPER = (9, 0)


@triton.jit
def after_others(AHEAD: tl.constexpr):
    """Wait until the kernel before is done and its results can be seen, then let the next one start."""
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()


def ahead(x: torch.Tensor) -> dict[str, Any]:
    """Launch options for a kernel that calls `after_others`, on the device of `x`."""
    return _options(x.device)


@cache
def _options(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < _HOPPER:
        return {"AHEAD": False}
    return {"AHEAD": True, "launch_pdl": True}
