"""What is known of AMD's GPU architectures without asking a GPU.

Sources, read in November 2026: names, waves and LDS from ROCm's page "AMD GPU specifications"; 8-bit floats from its
page "Data types and precision support"; matrix instructions from LLVM's AMDGPU guide. Triton's AMD back end (3.9)
has the same LDS sizes: 160 KiB on gfx950, 64 KiB for a program of the others (an RDNA work-group processor has 128
for two of them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Float8(Enum):
    """Which 8-bit floats the matrix instructions multiply."""

    NONE = "none"
    FNUZ = "fnuz"  # float8_e4m3fnuz: no negative zero, no infinity, half of what e4m3fn makes of the same bits
    OCP = "OCP"  # float8_e4m3fn, what checkpoints hold


@dataclass(frozen=True)
class Architecture:
    """One GPU architecture.

    Attributes:
        name: LLVM's ("gfx942"); chips: what people buy.
        wave: threads in lockstep, in the mode that the compiler uses.
        lds_bytes: shared memory (LDS) that one program may have.
        float8: 8-bit floats that its matrix instructions multiply.
        matrix: its kind of matrix instructions, MFMA or WMMA; all of these take bfloat16.
    """

    name: str
    chips: str
    wave: int
    lds_bytes: int
    float8: Float8
    matrix: str


_KIB = 1024
ARCHITECTURES: Mapping[str, Architecture] = {
    chip.name: chip
    for chip in (
        Architecture("gfx90a", "Instinct MI210, MI250, MI250X", 64, 64 * _KIB, Float8.NONE, "MFMA"),
        Architecture("gfx942", "Instinct MI300A, MI300X, MI325X", 64, 64 * _KIB, Float8.FNUZ, "MFMA"),
        Architecture("gfx950", "Instinct MI350X, MI355X", 64, 160 * _KIB, Float8.OCP, "MFMA"),
        Architecture("gfx1100", "Radeon RX 7900, PRO W7800, W7900", 32, 64 * _KIB, Float8.NONE, "WMMA"),
        Architecture("gfx1201", "Radeon RX 9070, AI PRO R9700", 32, 64 * _KIB, Float8.OCP, "WMMA"),
    )
}


def named(version: int) -> str:
    """ "gfx942" of 90402, the driver's `gfx_target_version`: major * 10000 + minor * 100 + stepping, which is hex."""
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"
