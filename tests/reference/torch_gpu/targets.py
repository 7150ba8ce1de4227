"""GPUs that kernels are compiled for without having one: what Triton calls them, and what their programs may use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from hardpoint_torch_gpu.limits import Limits, limits_for
from triton.backends.compiler import GPUTarget

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"
#: Triton's names of 8-bit floats: what checkpoints hold, and the other kind.
OCP, FNUZ = "*fp8e4nv", "*fp8e4b8"
#: Shared memory of a program by compute capability (CUDA C++ programming guide, "Technical specifications").
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@dataclass(frozen=True)
class Target:
    """A GPU.

    Attributes:
        label: "sm_90", "gfx942".
        gpu: for Triton.
        limits: by which launches are shaped.
        floats: Triton's names of the 8-bit floats that it multiplies; devices without one are told not to.
    """

    label: str
    gpu: GPUTarget
    limits: Limits
    floats: tuple[str, ...]

    @property
    def amd(self) -> bool:
        """Whether Triton compiles for it with its AMD back end."""
        return self.gpu.backend == "hip"


def target(name: str) -> Target:
    """From "90", a compute capability, or "gfx942"."""
    if name.isdigit():
        capability = int(name)
        gpu = GPUTarget("cuda", capability, 32)
        return Target(
            f"sm_{name}", gpu, limits_for("cuda", name, 32, SHARED[capability]), (OCP,) if capability >= 89 else ()
        )
    if (folder := str(PLUGINS / "rocm")) not in sys.path:
        sys.path.append(folder)  # as a script, without pytest's settings
    from hardpoint_rocm.architectures import ARCHITECTURES, Float8

    chip = ARCHITECTURES[name]
    floats = {Float8.NONE: (), Float8.OCP: (OCP,), Float8.FNUZ: (FNUZ,)}[chip.float8]
    return Target(name, GPUTarget("hip", name, chip.wave), limits_for("hip", name, chip.wave, chip.lds_bytes), floats)
