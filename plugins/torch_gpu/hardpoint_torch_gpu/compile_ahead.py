"""Kernels of a step compiled side by side before it runs: one after another they are most of a first start.

The step is walked once with every Triton kernel compiled in a pool of threads and none launched (the compiler works
outside the interpreter's lock), so that what the kernels would have written is zero: indices among it stay valid. What
torch itself computes runs as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # Triton before 3.4
    AsyncCompileMode = None

#: Threads at most: a step has no more than some fifteen kernels.
_MOST = 16
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Zeroed(TorchDispatchMode):
    """What is made without values is made of zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY else made


@contextmanager
def compiling_alone(seen: set[Hashable]) -> Iterator[list[Any]]:
    """Kernels that were not `seen` are compiled, none is launched; yields them. For the one thread that starts an
    engine: Triton's launcher is the process's."""
    launch = JITFunction.run
    kernels: list[Any] = []

    def compile_alone(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        # Triton takes milliseconds to find that a kernel is being compiled already, and a model has many layers.
        asked = (self, *map(_likeness, args), *((name, _likeness(value)) for name, value in named.items()))
        if asked in seen:
            return None
        seen.add(asked)
        kernels.append(launch(self, *args, grid=grid, warmup=True, **named))
        return None

    JITFunction.run = compile_alone
    try:
        yield kernels
    finally:
        JITFunction.run = launch


def _likeness(value: Any) -> Hashable:
    """What Triton tells arguments apart by, or more."""
    return (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, torch.Tensor) else value


class CompileAhead:
    """Walks one step of each kind and compiles all that they launch at once. Where the first kernel is on disk, all are
    taken to be, and no more steps are walked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kinds: set[Hashable] = set()
        self._seen: set[Hashable] = set()
        self._kernels: list[Any] = []
        #: Kernels that were not on disk, as far as anybody listened.
        self.missing = 0
        self._done = threads() == 1
        self._open: tuple[ThreadPoolExecutor, Any, Any] | None = None

    def begin(self, kind: Hashable, step: Callable[[], object]) -> None:
        """Start to compile what `step` would launch. Steps of one `kind` are thought to launch the same kernels."""
        if self._done or kind in self._kinds:
            return
        self._kinds.add(kind)
        if self._open is None:
            pool = ThreadPoolExecutor(threads())
            self._open = pool, AsyncCompileMode(pool, ignore_errors=True), knobs.compilation.listener
            self._open[1].__enter__()
            knobs.compilation.listener = self._heard
        zeroed = _Zeroed()  # type: ignore[no-untyped-call]
        with compiling_alone(self._seen) as kernels, zeroed, suppress(Exception):
            step()  # what it runs into on zeros is no fault: it will run once more on what is real
        promised = [kernel for kernel in kernels if hasattr(kernel, "future")]
        self._kernels += promised
        if promised and not self.missing:
            self._load(promised[0])
            if not self.missing:
                self.finish()

    def finish(self) -> None:
        """Wait for all of it. Nothing is compiled ahead from here on."""
        self._done = True
        if self._open is None:
            return
        pool, mode, listener = self._open
        self._open = None
        mode.__exit__(None, None, None)
        knobs.compilation.listener = listener
        with pool:
            list(pool.map(self._make_launcher, self._kernels))
        for kernel in self._kernels:
            self._load(kernel)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count what is compiled inside, too."""
        before = knobs.compilation.listener
        knobs.compilation.listener = self._heard
        try:
            yield
        finally:
            knobs.compilation.listener = before

    def _make_launcher(self, kernel: Any) -> None:
        """Have the host's compiler make its launcher, where this Triton has one per signature, and leave it on disk.

        Which launcher one gets beside other threads is not sure: all are Python modules of one name, and the one that
        was loaded last may be what each of them is.
        """
        with torch.cuda.device(self._device), suppress(Exception):  # a launch will tell
            made = kernel.result()
            driver.active.launcher_cls(made.src, made.metadata)

    def _load(self, kernel: Any) -> None:
        """Put it on the GPU, with its launcher. One at a time, see `_make_launcher`."""
        with torch.cuda.device(self._device), suppress(Exception):  # a launch will tell
            _ = kernel.result().run

    def _heard(self, *, cache_hit: bool, **_: Any) -> None:
        self.missing += not cache_hit


def threads() -> int:
    """Threads to compile with: 1 where this Triton has no way to use more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST) if AsyncCompileMode is not None else 1
