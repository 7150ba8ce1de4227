"""Vector registers that kernels may spill when they are compiled for AMD's GPUs.

A spill costs time and is no fault. These are the most that a Triton makes of any launch on gfx942 and gfx950, and on
gfx1100, rounded up to tens (2026-11-30): so that more of them is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping

#: By Triton's version, then by kernel: on architectures with waves of 64 and of 32 lanes. Other kernels spill none.
SPILLS: Mapping[tuple[int, int], Mapping[str, tuple[int, int]]] = {
    # What torch 2.13's builds for GPUs ask for.
    (3, 7): {
        # Wide heads (256): the sums alone take half of what a lane has; float32 products of RDNA have no instruction.
        "_prefill": (20, 1180),
        "_decode": (0, 1010),
        "_shared": (0, 550),
        # Latents of 512 numbers: one tile's sums are all that a wave of RDNA has.
        "_mla_prefill": (290, 1030),
        "_mla_decode": (230, 740),
        "_delta_blocks": (0, 50),
        "_ssm_blocks": (0, 10),
        # Scales of groups beside the sums; columns that do not fill the last step.
        "_eight_bit_dot": (0, 20),
        "_quant_dot": (0, 120),
        "_grouped": (0, 40),
        "_skinny": (0, 100),
    },
    (3, 9): {
        "_prefill": (30, 990),
        "_decode": (0, 970),
        "_shared": (0, 550),
        "_mla_prefill": (280, 1760),
        "_mla_decode": (230, 750),
        "_delta_blocks": (0, 10),
        "_eight_bit_dot": (0, 20),
        "_quant_dot": (10, 50),
        "_skinny": (0, 70),
    },
}
#: What single architectures spill beyond that. With Triton 3.9 gfx90a and gfx1201 were not looked at.
MORE: Mapping[tuple[int, int], Mapping[tuple[str, str], int]] = {
    (3, 7): {
        ("gfx90a", "_quant_dot"): 10,
        # gfx1100 multiplies no 8-bit floats.
        ("gfx1201", "_eight_bit_dot"): 600,
        ("gfx1201", "_grouped"): 50,
        ("gfx1201", "_shared"): 560,
    },
}


def allowed(version: str, wave: int, name: str, architecture: str = "") -> int:
    """For kernel `name` where a wave has so many lanes. A Triton without a table has that of the next older one."""
    major, minor = (int(part) for part in version.split(".")[:2])
    known = max((each for each in SPILLS if each <= (major, minor)), default=min(SPILLS))
    most = SPILLS[known].get(name, (0, 0))[wave == 32]
    return max(most, MORE.get(known, {}).get((architecture, name), 0))
