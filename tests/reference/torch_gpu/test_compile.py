"""Kernels compile for GPUs from Ampere to Blackwell, none of which is here; `ahead_of_time.py` compiles all for all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.reference

CAPABILITIES = ("80", "90", "100")


@pytest.fixture
def compiling(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`ahead_of_time.py`, or the script named first, with arguments: kernels are compiled there and not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        script = words[0] if words[0].endswith(".py") else "ahead_of_time.py"
        words = words[words[0] == script :]
        command = [sys.executable, Path(__file__).with_name(script), *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return run


def test_no_product_runs_on_into_a_step_that_makes_its_numbers_anew(
    compiling: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = compiling("--packed", "90")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split(" sm_90: ")[0] for line in done.stdout.splitlines()} == {"_quant_dot", "_grouped"}


def test_every_kernel_compiles_for_a_generation_in_turn(
    compiling: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = compiling("--turns", *CAPABILITIES)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = [line.split(" sm_") for line in done.stdout.splitlines() if line.endswith(" bytes")]
    kernels = {name for name, _ in compiled}
    assert {"_decode", "_prefill", "_store", "_gemv", "_norm", "_rope", "_activate", "_pieces", "_rows"} <= kernels
    assert "_prepare" in kernels
    assert {rest.partition(":")[0] for _, rest in compiled} == set(CAPABILITIES)


def test_a_norm_that_rounds_adds_up_as_the_norm_alone(
    compiling: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = compiling("order_of_sums.py", "90", "gfx942")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 2 * 2 * 3 * 2
