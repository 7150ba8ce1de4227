"""Compile every Triton kernel for GPUs that are not here: launches of the contracts' samples are noted, not made.

python ahead_of_time.py 80 90 100            compute capabilities of NVIDIA GPUs
python ahead_of_time.py gfx942 gfx1100       architectures of AMD GPUs; what each launch uses is told beside its limits
python ahead_of_time.py --turns 80 90 100    one launch of each kernel, for one of these
python ahead_of_time.py --packed 90          products of quantized weights with many rows of x alone
"""

from __future__ import annotations

import inspect
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from in_flight import in_flight
from largest import note_largest, note_packed
from launches import note_eight_bits, note_products
from targets import FNUZ, OCP, Target, target
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.platform import ReferenceDevice

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: OCP,
    torch.float8_e4m3fnuz: FNUZ,
}
OPTIONS = ("num_warps", "num_stages")
#: Triton takes pointers for multiples of this, and numbers that are, as the launcher does.
ALIGNED = 16
#: Hopper, whose products may run on while the program does.
HOPPER = 90
#: Ops whose kernels are compiled in float32 too.
_OF_BOTH = ("attention", "rotary_attention")
#: Rows of x for `--packed`: the lowest tiles of these products and the highest.
MANY_ROWS = (32, 128)
#: Kernels that make numbers of quantized weights in registers: their products may not run on into the next step.
IN_REGISTERS = ("_quant_dot", "_grouped")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, without its grid.

    Attributes:
        kernel: what is launched.
        signature: Triton's type of each argument; constants: of constexpr ones the values.
        aligned: places of arguments that are multiples of `ALIGNED`.
        options: warps and stages.
    """

    kernel: JITFunction[Any]
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """Of the kernel."""
        return str(self.kernel.fn.__name__)

    def takes(self, kind: str) -> bool:
        """Whether an argument has this type."""
        return any(kind == each for _, each in self.signature)


@dataclass(frozen=True)
class Compiled:
    """What a launch came to: bytes of code; shared memory; spilled vector registers (AMD's compiler tells them)."""

    size: int
    shared: int
    spills: int

    def told(self, at: Target) -> str:
        """As the line for it ends."""
        room = at.limits.shared_bytes
        over = f" OVER {room}" if self.shared > room else ""
        return (
            f"{self.size} bytes" if not at.amd else f"{self.size} bytes, LDS {self.shared}{over}, spills {self.spills}"
        )


class Noted:
    """Distinct launches, in the order in which they were made."""

    def __init__(self) -> None:
        self.launches: dict[str, Launch] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Launches are noted here and not made."""
        JITFunction.__getitem__ = lambda kernel, grid: self.note(kernel, grid)  # type: ignore[method-assign, assignment]
        yield

    def note(self, kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
        """What `kernel[grid]` gives instead of a launcher."""
        names = list(inspect.signature(kernel.fn).parameters)
        constant = {names[index] for index in kernel.constexprs}

        def launch(*args: Any, **named: Any) -> None:
            options = tuple((name, named.pop(name)) for name in OPTIONS if name in named)
            given = inspect.signature(kernel.fn).bind(*args, **named).arguments
            made = Launch(
                kernel,
                tuple((name, "constexpr" if name in constant else _type(given[name])) for name in names),
                tuple((name, given[name]) for name in names if name in constant),
                tuple(place for place, one in enumerate(kernel.params) if _aligned(one, given[names[place]])),
                options,
            )
            self.launches.setdefault(repr((made.name, made.signature, made.constants)), made)

        return launch


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def _aligned(parameter: Any, value: Any) -> bool:
    if parameter.is_constexpr or parameter.do_not_specialize:
        return False
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % ALIGNED == 0)


def noted(at: Target, turns: bool) -> list[Launch]:
    """The launches that a device of this kind makes for the samples, and for what no sample reaches: one per path.

    Without `turns` all of `note_largest` too for AMD's GPUs, on which a program may have little, and for Hopper, where
    the size of a tile decides between instructions.
    """
    _shape_for(at)
    book, large = Noted(), Noted()
    float8 = torch.float8_e4m3fnuz if FNUZ in at.floats else torch.float8_e4m3fn
    with book.noting():
        for provider in _providers(at):
            for dtype in (torch.bfloat16, torch.float32) if provider.op in _OF_BOTH else (torch.bfloat16,):
                for case in CONTRACTS[provider.op].samples(dtype):
                    if provider.supports(case.instance):
                        with torch.inference_mode():
                            run(provider, case)
        note_products()
        note_eight_bits(float8)
    if (at.amd or at.gpu.arch == HOPPER) and not turns:
        with large.noting():
            note_largest(float8)
    missing = {OCP, FNUZ} - {*at.floats}
    found = (*_one_each(book.launches.values()), *large.launches.values())
    return [launch for launch in found if not any(map(launch.takes, missing))]


def packed(at: Target) -> list[Launch]:
    """Products of quantized weights, whose numbers are made in registers."""
    _shape_for(at)
    book = Noted()
    with book.noting():
        note_packed(MANY_ROWS)
    return [launch for launch in book.launches.values() if launch.name in IN_REGISTERS]


def _providers(at: Target) -> Sequence[OpProvider]:
    from hardpoint_torch_gpu.providers import triton_providers

    if not at.amd:
        return triton_providers(ReferenceDevice())
    from hardpoint_rocm.fnuz import as_fnuz

    found = triton_providers(ReferenceDevice(), bool(at.floats))
    return as_fnuz(found) if FNUZ in at.floats else found


def _shape_for(at: Target) -> None:
    """Launches are shaped for this GPU, whichever module asks for its limits."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hardpoint_torch_gpu.") and hasattr(module, "limits_of"):
            module.limits_of = lambda device: at.limits  # type: ignore[attr-defined]


def built(launch: Launch, at: Target) -> Any:
    """What Triton makes of it. Raises what Triton raises for a launch that does not compile."""
    constants, options = dict(launch.constants), dict(launch.options)
    if not at.amd and at.gpu.arch >= 90 and "AHEAD" in constants:
        constants, options = constants | {"AHEAD": True}, options | {"launch_pdl": True}
    source = ASTSource(
        fn=launch.kernel,
        signature=dict(launch.signature),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", ALIGNED]] for place in launch.aligned},
    )
    return compile(source, target=at.gpu, options=options)


def compiled(launch: Launch, at: Target) -> Compiled:
    """Raises what `built` raises, RuntimeError for a launch that `in_flight` finds."""
    done = built(launch, at)
    if not at.amd:
        if wrong := in_flight(done.asm["ptx"], launch.name not in IN_REGISTERS):
            raise RuntimeError(f"faults of products under way: {len(wrong)}, first: {wrong[0]}")
        return Compiled(len(done.asm["cubin"]), done.metadata.shared, 0)
    spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", done.asm["amdgcn"])
    assert spills is not None
    return Compiled(len(done.asm["hsaco"]), done.metadata.shared, int(spills[1]))


def plan(targets: Sequence[Target], turns: bool, only_packed: bool = False) -> Iterable[tuple[Launch, Target]]:
    """What is compiled for what: all, or what is `packed`.

    With `turns` one launch of each kernel, for one target by the kernel's name.
    """
    for place, at in enumerate(targets):
        launches: Iterable[Launch] = packed(at) if only_packed else noted(at, turns)
        if turns:
            first = {launch.name: launch for launch in reversed(list(launches))}
            launches = [launch for name, launch in first.items() if zlib.crc32(name.encode()) % len(targets) == place]
        yield from ((launch, at) for launch in launches)


def main() -> int:
    """Note, then compile; one line per kernel and target."""
    failed, done, turns = 0, 0, "--turns" in sys.argv
    targets = [target(word) for word in sys.argv[1:] if not word.startswith("-")]
    for launch, at in plan(targets, turns, "--packed" in sys.argv):
        done += 1
        try:
            print(f"{launch.name} {at.label}: {compiled(launch, at).told(at)}", flush=True)
        except Exception as error:
            failed += 1
            constants = dict(launch.constants)
            print(f"{launch.name} {at.label} {constants}: {type(error).__name__}: {error}", flush=True)
    return int(bool(failed) or not done)


def _one_each(launches: Iterable[Launch]) -> list[Launch]:
    """Per kernel, its dtypes and its switches one launch: sizes alone make no other path, but for those that are 0."""
    found: dict[str, Launch] = {}
    for launch in launches:
        switches = tuple((name, bool(value)) for name, value in launch.constants)
        found.setdefault(repr((launch.name, launch.signature, switches)), launch)
    return list(found.values())


if __name__ == "__main__":
    sys.exit(main())
