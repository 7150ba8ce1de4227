"""What a GPU gives one program of a kernel: launches are shaped by these numbers, no kernel asks whose GPU it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

#: Targets on which Triton copies from memory straight into shared memory; on AMD's others the last step of a loop that
#: is loaded ahead waits in registers (`is_async_copy_enabled` of its AMD back end, 3.9).
_DIRECT = ("gfx950", "gfx1250")
#: RDNA's matrix instructions want each operand twice, in 256 registers per lane: found by counting spills on gfx1100.
_RDNA_OPERAND = 4096
_LEAST_COLUMNS = 32
#: Rows are padded in shared memory on some targets: by up to this part of them.
_PADDING = 32


@dataclass(frozen=True)
class Limits:
    """Of one program.

    Attributes:
        shared_bytes: shared memory (AMD: LDS) that it may have.
        wave: threads that run in lockstep.
        spare: steps of a loop loaded ahead that take no shared memory.
        operand_bytes: of an operand that all lanes of a wave need whole, so much leaves registers for the rest; 0: any.
    """

    shared_bytes: int
    wave: int = 32
    spare: int = 0
    operand_bytes: int = 0

    def stages(self, wanted: int, step_bytes: int) -> int:
        """Steps of a loop that may be under way at once, from 1 to `wanted`; each loads `step_bytes`."""
        return max(min(wanted, self.shared_bytes // (step_bytes + step_bytes // _PADDING) + self.spare), 1)

    def eases(self, operand_bytes: int) -> bool:
        """Whether a wave holds an operand of this size with ease."""
        return not self.operand_bytes or operand_bytes <= self.operand_bytes

    def columns(self, rows: int, wanted: int, itemsize: int) -> int:
        """Columns of a step, `wanted` at most and 32 at least, of which a wave makes `rows` rows with ease."""
        while wanted > _LEAST_COLUMNS and not self.eases(rows * wanted * itemsize):
            wanted //= 2
        return wanted

    def held(self, stages: int, step_bytes: int) -> int:
        """Bytes of shared memory that a loop of so many stages takes."""
        return max(stages - self.spare, 1) * step_bytes


#: Where there is no GPU kernels are only compiled or interpreted: as for an H200.
ELSEWHERE = Limits(232448)


@cache
def limits_of(device: torch.device) -> Limits:
    """Of the GPU `device`, as Triton checks them when it loads a kernel; `ELSEWHERE` of any other device."""
    if device.type != "cuda":
        return ELSEWHERE
    from triton.runtime import driver

    target = driver.active.get_current_target()
    properties = driver.active.utils.get_device_properties(device.index or 0)
    return limits_for(target.backend, str(target.arch), target.warp_size, properties["max_shared_mem"])


def limits_for(backend: str, architecture: str, wave: int, shared_bytes: int) -> Limits:
    """The same from what Triton calls a target ("cuda" and "90", or "hip" and "gfx942")."""
    amd = backend == "hip"
    spare = int(amd and not architecture.startswith(_DIRECT))
    return Limits(shared_bytes, wave, spare, _RDNA_OPERAND if amd and wave == 32 else 0)
