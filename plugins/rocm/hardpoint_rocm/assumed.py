"""A test mode: an NVIDIA GPU passes for an AMD one, as torch has both under the same names.

With HARDPOINT_ROCM_ASSUME_HIP=1 this plugin's device, graphs, transfers, collectives and op table run for real where
there is no AMD GPU. It says nothing of AMD's compiler, chips or speed, so nobody shall come to serve with it: it is
granted to processes in which pytest or the conformance kit is loaded, and to children of a test.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping

import torch

from hardpoint_platforms.device import DeviceInfo
from hardpoint_rocm.architectures import Architecture, Float8

log = logging.getLogger(__name__)

VARIABLE = "HARDPOINT_ROCM_ASSUME_HIP"
#: Modules that are loaded where a device is being tested, and by nothing that serves.
_TESTERS = ("pytest", "hardpoint_platforms.conformance.subject")
#: Set by pytest, and so inherited by the processes that a test starts.
_CHILD = "PYTEST_CURRENT_TEST"
#: Lowest compute capability that multiplies float8_e4m3fn.
_FLOAT8 = (8, 9)


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the mode is asked for."""
    return environment.get(VARIABLE, "0") not in ("", "0")


def refusal(environment: Mapping[str, str] = os.environ, modules: Collection[str] | None = None) -> str:
    """Why the mode is refused in this process; "" where it is granted."""
    loaded = sys.modules if modules is None else modules
    if not (_CHILD in environment or any(module in loaded for module in _TESTERS)):
        return (
            f"{VARIABLE} is a test mode: it works under pytest and `hardpoint conformance`, and never serves; unset it"
        )
    if torch.version.cuda is None:
        return f"{VARIABLE} wants a torch for NVIDIA GPUs, this is {torch.__version__}"
    return "" if torch.cuda.device_count() else f"{VARIABLE} wants an NVIDIA GPU, torch finds none"


def devices() -> tuple[DeviceInfo, ...]:
    """The GPUs that pass for AMD's; their memory is known once one is open."""
    return tuple(
        DeviceInfo("rocm", index, "an NVIDIA GPU that passes for AMD's", stand_in=True)
        for index in range(torch.cuda.device_count())
    )


def architecture(index: int) -> Architecture:
    """What passes for its architecture. Says aloud that nothing here is an AMD GPU."""
    name = torch.cuda.get_device_name(index)
    log.warning("%s=1: %s passes for an AMD GPU. A test mode: what runs here was not run on AMD", VARIABLE, name)
    float8 = Float8.OCP if torch.cuda.get_device_capability(index) >= _FLOAT8 else Float8.NONE
    return Architecture("assumed", name, 32, 0, float8, "none of AMD's")
