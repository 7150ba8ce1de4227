"""The native side of an opened device: which library and variant, its pool, its providers and programs; or why none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hardpoint_cpu.machine import Machine
from hardpoint_cpu.native.ceiling import measure_ceilings
from hardpoint_cpu.native.library import LibraryUnavailable, NativeLibrary, Pool, find_library
from hardpoint_cpu.native.program import TapeBuilder
from hardpoint_cpu.native.provider import Setting
from hardpoint_cpu.native.providers import native_providers
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.capabilities import TuningChoice
from hardpoint_platforms.ceilings import Ceilings
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.program import ProgramBuilder

#: On fewer processors a pinned thread would stand in the way of the front end, which has to run somewhere too.
_LEAST_TO_PIN = 4


class Backend:
    """Library, pool and stage of one device. `close` ends the threads."""

    def __init__(self, library: NativeLibrary, machine: Machine, threads: int, options: Mapping[str, Any]) -> None:
        variant = library.use(options.get("isa"))
        self.exact = options.get("numerics") == "exact"
        # Safe only where nobody else's threads are left out: one for each processor that this process may use.
        pin = threads == len(machine.cpus) >= _LEAST_TO_PIN
        self._pool = Pool(library, threads, sorted(machine.cpus) if pin else None)
        self.stage = Stage(library, self._pool)
        self._setting = Setting(self.stage, self.exact)
        self.choices = (_kernels(library, variant, options.get("isa")), _numerics(self.exact), _pinned(pin, threads))
        halves = (torch.float16, torch.float32, torch.bfloat16)
        #: Dtypes of cached keys and values, best first.
        self.kv_dtypes = (torch.float32, torch.float16, torch.bfloat16) if self.exact else halves

    def providers(self) -> Sequence[OpProvider]:
        """A fresh set."""
        return native_providers(self._setting)

    def programs(self) -> ProgramBuilder:
        """Tapes."""
        return TapeBuilder(self.stage)

    def ceilings(self) -> Ceilings | None:
        """Measured by the library; None where it is too old for that."""
        return measure_ceilings(self.stage, self.exact)

    def kernel_seconds(self) -> float:
        """Seconds in native kernels since the last call."""
        return sum(self.stage.library.profile().values())

    def close(self) -> None:
        """End the threads."""
        self._pool.close()


def load(options: Mapping[str, Any]) -> tuple[NativeLibrary | None, tuple[TuningChoice, ...]]:
    """The library, or None and the choice that says why torch's kernels run instead.

    Raises DeviceUnavailable where the options ask for native kernels and there are none.
    """
    asked = options.get("kernels")
    if asked == "torch":
        return None, (TuningChoice("kernels", "torch", "asked for"),)
    if options.get("dtype") not in (None, "float32"):
        if asked == "native":
            raise DeviceUnavailable("native kernels compute in float32", hint="leave the option dtype out")
        return None, (TuningChoice("kernels", "torch", f"native ones do not compute in {options['dtype']}"),)
    try:
        return find_library(), ()
    except LibraryUnavailable as error:
        if asked == "native" or options.get("isa") is not None:
            raise DeviceUnavailable(f"no native kernels: {error}", hint=error.mend) from None
        return None, (TuningChoice("kernels", "torch", f"{error}; for several times the speed: {error.mend}"),)


def _kernels(library: NativeLibrary, variant: str, asked: str | None) -> TuningChoice:
    compiled = ", ".join(f"{name}{'' if runs else ' (not here)'}" for name, runs in library.variants.items())
    why = "asked for" if asked else "best that runs here"
    return TuningChoice("kernels", f"native {variant}", f"{why}; compiled: {compiled}")


def _numerics(exact: bool) -> TuningChoice:
    if exact:
        return TuningChoice("numerics", "exact", "quantized weights dequantized at load, float32 products and KV cache")
    told = "quantized weights by activations rounded to int8 per block, float32 sums, float16 KV cache"
    return TuningChoice("numerics", "fast", f"{told}; --numerics exact for float32")


def _pinned(pin: bool, threads: int) -> TuningChoice:
    if pin:
        return TuningChoice("pinning", "one thread per processor", f"{threads} threads on as many allowed processors")
    return TuningChoice("pinning", "none", "threads may move, so that the front end is not in their way")
