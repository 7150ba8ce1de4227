"""Compile Triton kernels for AMD GPUs, none of which is here, and hold what they use against what a program may have.

python compile_gate.py gfx942 gfx1100            every launch, for each of these architectures
python compile_gate.py --turns gfx942 gfx1100    a few launches of each kernel, for one of them in turn

By the Triton of the environment, or, with PYTHONPATH=.venv/triton-pinned, by the one that torch's builds for GPUs ask
for (`.ci/install` puts it there). That it compiles says little: shared memory (LDS) is only checked when a kernel is
loaded, spilled registers never.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not said
sys.path.append(str(Path(__file__).resolve().parents[1] / "torch_gpu"))

import ahead_of_time
import triton
from spills import allowed
from targets import Target, target

if TYPE_CHECKING:
    from ahead_of_time import Compiled, Launch


def complaint(name: str, found: Compiled, at: Target, version: str = triton.__version__) -> str:
    """What is wrong with a compiled launch of kernel `name`; "" where nothing is. `version`: of Triton."""
    if found.shared > at.limits.shared_bytes:
        return f"LDS {found.shared}, a program of {at.label} has {at.limits.shared_bytes}"
    most = allowed(version, at.limits.wave, name, at.label)
    return f"spills {found.spills} registers, {most} are allowed" if found.spills > most else ""


def attempt(launch: Launch, at: Target) -> tuple[str, bool]:
    """A line about one launch, and whether it may stay so."""
    sizes = " ".join(f"{name}={value}" for name, value in launch.constants if isinstance(value, int) and value > 1)
    started = time.monotonic()
    try:
        found = ahead_of_time.compiled(launch, at)
    except Exception as error:  # Triton raises of many kinds: the kernel does not compile
        return f"{launch.name} {at.label} {sizes}: FAIL {type(error).__name__}: {_last(error)}", False
    wrong = complaint(launch.name, found, at)
    told = f"{found.told(at)}, {time.monotonic() - started:.1f} s"
    return f"{launch.name} {at.label} {sizes}: {f'FAIL {wrong}; ' if wrong else ''}{told}", not wrong


def _last(error: BaseException) -> str:
    """The last line that tells: Triton shows the source first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip(" ^")]
    return lines[-1].strip() if lines else ""


def main(words: Iterable[str]) -> int:
    """One line per launch, and a last one. The exit code: 1 if any fails."""
    turns, names = "--turns" in words, [word for word in words if not word.startswith("-")]
    good = bad = 0
    for launch, at in ahead_of_time.plan([target(name) for name in names], turns):
        line, fine = attempt(launch, at)
        good, bad = good + fine, bad + (not fine)
        print(line, flush=True)
    print(f"Triton {triton.__version__}, {', '.join(names)}: {good} launches compile within the limits, {bad} do not")
    return int(bool(bad) or not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
