"""Compile every Triton kernel for GPUs that are not here: launches of the contracts' samples are noted, not made.

python ahead_of_time.py 80 90 100            compute capabilities of NVIDIA GPUs
python ahead_of_time.py --turns 80 90 100    two launches of each kernel, for one of them in turn
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from hardpoint_platforms.ops.catalogue import CONTRACTS
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
    torch.float8_e4m3fn: "*fp8e4nv",
}
#: Compute capability from which GPUs multiply 8-bit floats; older ones are told not to (`triton_providers`).
FLOAT8 = 89
#: (kernel, signature, constants, options) of each distinct launch.
Launch = tuple[JITFunction, tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...], tuple[tuple[str, int], ...]]
OPTIONS = ("num_warps", "num_stages")
LAUNCHES: dict[str, Launch] = {}


def note(kernel: JITFunction, grid: Any) -> Callable[..., None]:
    """What `kernel[grid]` gives instead of a launcher."""
    names = list(inspect.signature(kernel.fn).parameters)
    constant = {names[index] for index in kernel.constexprs}

    def launch(*args: Any, **named: Any) -> None:
        options = tuple((name, named.pop(name)) for name in OPTIONS if name in named)
        given = inspect.signature(kernel.fn).bind(*args, **named).arguments
        signature = tuple((name, "constexpr" if name in constant else _type(given[name])) for name in names)
        constants = tuple((name, given[name]) for name in names if name in constant)
        LAUNCHES.setdefault(repr((kernel.fn.__name__, signature, constants)), (kernel, signature, constants, options))

    return launch


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def main() -> int:
    """Note, then compile; one line per kernel and target."""
    JITFunction.__getitem__ = note  # type: ignore[method-assign]
    from hardpoint_torch_gpu.providers import triton_providers

    for provider in triton_providers(ReferenceDevice()):
        for dtype in (torch.bfloat16, torch.float32) if provider.op == "attention" else (torch.bfloat16,):
            for case in CONTRACTS[provider.op].samples(dtype):
                with torch.inference_mode():
                    run(provider, case)
    from launches import note_eight_bits, note_products

    note_products()
    note_eight_bits()
    kept = _one_each(LAUNCHES.values())
    failed, turns = 0, "--turns" in sys.argv
    if turns:
        kept = _two_each(kept)
    capabilities = [int(word) for word in sys.argv[1:] if word.isdigit()]
    for number, (kernel, signature, constants, options) in enumerate(kept):
        float8 = any(kind == TYPES[torch.float8_e4m3fn] for _, kind in signature)
        able = [capability for capability in capabilities if capability >= FLOAT8 or not float8]
        for capability in able[number % max(len(able), 1) :][:1] if turns else able:
            hopper = capability >= 90 and "AHEAD" in dict(constants)
            source = ASTSource(
                fn=kernel, signature=dict(signature), constexprs=dict(constants) | ({"AHEAD": True} if hopper else {})
            )
            try:
                done = compile(
                    source,
                    target=GPUTarget("cuda", capability, 32),
                    options=dict(options) | ({"launch_pdl": True} if hopper else {}),
                )
                print(f"{kernel.fn.__name__} sm_{capability}: {len(done.asm['cubin'])} bytes")
            except Exception as error:
                failed += 1
                print(f"{kernel.fn.__name__} sm_{capability} {dict(constants)}: {type(error).__name__}: {error}")
    return int(bool(failed) or not kept)


def _one_each(launches: Any) -> list[Launch]:
    """Per kernel, its dtypes and its switches one launch: sizes alone make no other path, but for those that are 0."""
    found: dict[str, Launch] = {}
    for launch in launches:
        switches = tuple((name, bool(value)) for name, value in launch[2])
        found.setdefault(repr((launch[0].fn.__name__, launch[1], switches)), launch)
    return list(found.values())


def _two_each(launches: list[Launch]) -> list[Launch]:
    """The first two of each kernel."""
    seen, kept = Counter[str](), []
    for launch in launches:
        name = launch[0].fn.__name__
        seen[name] += 1
        if seen[name] <= 2:
            kept.append(launch)
    return kept


if __name__ == "__main__":
    sys.exit(main())
