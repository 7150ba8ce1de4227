"""Choices made for this machine when the device is opened: threads, NUMA, compute dtype.

Threads and nodes follow from what the process may use. The dtype is measured where bf16 could win, in at most 150 ms.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint_cpu.machine import Machine, physical_cores
from hardpoint_cpu.ops.blocked import has_blocks
from hardpoint_platforms.capabilities import TuningChoice
from hardpoint_platforms.errors import DeviceUnavailable

_BUDGET = 0.100  # seconds for all rounds of measuring; one round more may be under way
_GEMM = (32, 1024, 1024)  # a small batch's rows through a projection
_GEMV = (1, 2048, 1024)  # one row through weights that do not stay in the first caches
_HALF_UNITS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
#: bf16 goes first only if it wins clearly, so that a busy moment does not decide what a model answers.
_CLEAR_GAIN = 1.3
_THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Tuning:
    """What was chosen. `choices` say it to people."""

    threads: int
    compute_dtypes: tuple[torch.dtype, ...]
    blocked: bool
    choices: tuple[TuningChoice, ...]


def tune(machine: Machine, options: Mapping[str, Any], native: bool = False) -> Tuning:
    """Choose, and set torch's thread count and the process's affinity accordingly.

    `native`: kernels of our own run, which compute in float32, so that nothing of torch's is measured.

    Raises DeviceUnavailable for a NUMA node that is not there.
    """
    cpus, numa = _choose_numa(machine, options.get("numa"))
    threads, thread_choice = _choose_threads(machine, cpus, options.get("threads"))
    # Beside a pool of our own torch gets one thread: its others spin for milliseconds after a copy of 32,768 numbers.
    torch.set_num_threads(1 if native else threads)
    if native:
        return Tuning(threads, (torch.float32,), False, (thread_choice, numa))
    dtypes, dtype_choice = _choose_dtype(machine, options.get("dtype"))
    blocked, layout_choice = _choose_layout(dtypes, options.get("layout"))
    return Tuning(threads, dtypes, blocked, (thread_choice, numa, dtype_choice, layout_choice))


def _choose_numa(machine: Machine, node: int | None) -> tuple[frozenset[int], TuningChoice]:
    sizes = ", ".join(f"node {number}: {len(cpus)} processors" for number, cpus in machine.nodes.items())
    if node is None:
        count = len(machine.nodes)
        reason = sizes if count == 1 else f"{sizes}; a page lives where it is first touched, see option numa"
        return machine.cpus, TuningChoice("NUMA", f"{count} node{'s' * (count > 1)}, all used", reason)
    if node not in machine.nodes:
        raise DeviceUnavailable(f"there is no NUMA node {node} that this process may use", hint=f"there is {sizes}")
    _pin(machine.nodes[node])
    return machine.nodes[node], TuningChoice("NUMA", f"node {node} alone", f"asked for; {sizes}")


def _pin(cpus: frozenset[int]) -> None:
    """Keep this process's threads, those running and those to come, on `cpus`."""
    for task in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(task), cpus)
        except ProcessLookupError:
            continue  # the thread has just ended


def _choose_threads(machine: Machine, cpus: frozenset[int], asked: int | None) -> tuple[int, TuningChoice]:
    cores = physical_cores(cpus)
    facts = f"{cores} physical cores among {len(cpus)} allowed processors"
    if asked is not None:
        return asked, TuningChoice("threads", str(asked), f"asked for; {facts}")
    named = os.environ.get(_THREADS_VARIABLE, "")
    if named.isdigit() and int(named) > 0:
        return int(named), TuningChoice("threads", named, f"{_THREADS_VARIABLE}; {facts}")
    threads = cores
    if machine.quota is not None:
        # More threads than granted time would be stopped together, in the middle of a kernel.
        threads = max(1, min(cores, int(machine.quota)))
        facts += f", cgroup quota {machine.quota:g}"
    return threads, TuningChoice("threads", str(threads), facts)


def _choose_dtype(machine: Machine, asked: str | None) -> tuple[tuple[torch.dtype, ...], TuningChoice]:
    if asked is not None:
        return (getattr(torch, asked),), TuningChoice("compute dtype", asked, "asked for")
    if not machine.flags & _HALF_UNITS:
        return (torch.float32,), TuningChoice("compute dtype", "float32", "no bf16 instructions")
    start = time.perf_counter()
    gemm, half_gemm, gemv, half_gemv = _measure()
    spent = (time.perf_counter() - start) * 1e3
    units = sorted(machine.flags & _HALF_UNITS)
    told = (
        f"GEMM fp32 {gemm:.0f}, bf16 {half_gemm:.0f} GFLOP/s; GEMV fp32 {gemv:.0f}, bf16 {half_gemv:.0f} GFLOP/s "
        f"(measured, {spent:.0f} ms); bf16 instructions: {', '.join(units)}"
    )
    gain = ((half_gemm / gemm) * (half_gemv / gemv)) ** 0.5
    if half_gemm >= gemm and gain >= _CLEAR_GAIN:
        return (torch.bfloat16, torch.float32), TuningChoice("compute dtype", "bfloat16", told)
    return (torch.float32,), TuningChoice("compute dtype", "float32", told)


def _choose_layout(dtypes: tuple[torch.dtype, ...], asked: str | None) -> tuple[bool, TuningChoice]:
    """Not measured: a busy moment must not decide how weights lie, and a row's result with it."""
    if dtypes[0] is not torch.float32:
        return False, TuningChoice("weight layout", "plain", "blocks are for float32")
    if not has_blocks():
        return False, TuningChoice("weight layout", "plain", "this build of torch has no blocked products")
    if asked is not None:
        return asked == "blocked", TuningChoice("weight layout", asked, "asked for")
    return True, TuningChoice("weight layout", "blocked", "faster for few rows, and a row's result is its own")


def _measure() -> list[float]:
    """GFLOP/s of GEMM in fp32 and bf16, then GEMV likewise: the best of interleaved rounds within the budget."""
    runs = [(shape, _product(shape, dtype)) for shape in (_GEMM, _GEMV) for dtype in (torch.float32, torch.bfloat16)]
    best = [float("inf")] * len(runs)
    start = time.perf_counter()
    with torch.inference_mode():
        for _, run in runs:
            run()  # the first call builds the kernel and wakes the threads
        while best[0] == float("inf") or time.perf_counter() - start < _BUDGET:
            for place, (_, run) in enumerate(runs):
                begun = time.perf_counter()
                run()
                best[place] = min(best[place], time.perf_counter() - begun)
    return [2e-9 * shape[0] * shape[1] * shape[2] / taken for (shape, _), taken in zip(runs, best, strict=True)]


def _product(shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    rows, columns, inner = shape
    x, weight = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype)
    return lambda: torch.nn.functional.linear(x, weight)
