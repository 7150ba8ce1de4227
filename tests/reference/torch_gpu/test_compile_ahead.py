"""Walking a step: nothing is launched, what it makes is zero, and a step that fails so does not end the start.

And what is compiled in threads gets the launcher that is its own.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu import compile_ahead
from hardpoint_torch_gpu.compile_ahead import CompileAhead, compiling_alone
from triton.runtime.jit import JITFunction

pytestmark = pytest.mark.reference


class Kernel:
    """Stands for Triton's: notes how it was asked to run."""

    def __init__(self) -> None:
        self.runs: list[bool] = []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's launcher, replaced."""

    def launch(self: Kernel, *args: Any, grid: Any, warmup: bool, **named: Any) -> str:
        self.runs.append(warmup)
        return "a kernel"

    monkeypatch.setattr(JITFunction, "run", launch)
    return lambda kernel, *args, **named: JITFunction.run(kernel, *args, grid=(1,), warmup=False, **named)


def test_kernels_are_compiled_once_and_not_launched(run: Any) -> None:
    kernel, x = Kernel(), torch.zeros(4)
    before = JITFunction.run
    with compiling_alone(set()) as kernels:
        for _ in range(3):
            run(kernel, x, 4, BLOCK=16)
        run(kernel, x, 4, BLOCK=32)
        run(kernel, x.double(), 4, BLOCK=16)
    assert kernel.runs == [True] * 3
    assert kernels == ["a kernel"] * 3
    assert JITFunction.run is before
    run(kernel, x, 4, BLOCK=16)
    assert kernel.runs[-1] is False


def test_the_launcher_comes_back_when_a_step_fails(run: Any) -> None:
    before = JITFunction.run
    with pytest.raises(ZeroDivisionError), compiling_alone(set()):
        _ = 1 // 0
    assert JITFunction.run is before


def test_a_walk_makes_zeros_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "threads", lambda: 2)
    ahead, seen = CompileAhead(torch.device("cpu")), []

    def step() -> None:
        for made in (torch.empty(1000), torch.empty_like(torch.ones(9)), torch.ones(3).new_empty(8)):
            seen.append(bool(made.any()))
        raise RuntimeError("on zeros")

    ahead.begin("decode", step)
    ahead.begin("decode", step)
    ahead.finish()
    ahead.begin("mixed", step)
    assert seen == [False] * 3


def test_one_thread_compiles_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "threads", lambda: 1)
    ahead = CompileAhead(torch.device("cpu"))
    ahead.begin("decode", lambda: pytest.fail("walked"))
    ahead.finish()


class Compiled:
    """Stands for a compiled kernel whose launcher comes out of the one module that all are, as in Triton 3.6."""

    module: str | None = None

    def __init__(self, name: str, meet: threading.Barrier) -> None:
        self.src, self.metadata, self._meet, self._run = name, meet, meet, None
        self.future = True
        self.run_in: set[int] = set()

    def result(self) -> Compiled:
        return self

    @property
    def run(self) -> str | None:
        self.run_in.add(threading.get_ident())
        if self._run is None:
            self._run = Compiled.launcher(self.src, None)
        return self._run

    @staticmethod
    def launcher(src: str, meet: threading.Barrier | None) -> str | None:
        """Load the launcher of `src`, wait for the other threads to load theirs, take what the module has now."""
        Compiled.module = src
        if meet is not None:
            meet.wait(10)
        return Compiled.module


def test_each_kernel_gets_its_own_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(3)
    kernels = [Compiled(name, meet) for name in ("norm", "rope", "sample")]
    monkeypatch.setattr(compile_ahead, "threads", lambda: 3)
    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=Compiled.launcher))
    monkeypatch.setattr(compile_ahead, "driver", driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    ahead = CompileAhead(torch.device("cpu"))
    ahead.begin("decode", lambda: None)
    ahead._kernels = list(kernels)
    ahead.finish()
    assert meet.broken is False
    assert [kernel._run for kernel in kernels] == ["norm", "rope", "sample"]
    assert all(kernel.run_in == {threading.get_ident()} for kernel in kernels)
