"""Kernels compile for GPUs from Ampere to Blackwell, none of which is here; `ahead_of_time.py` compiles all for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.reference

CAPABILITIES = ("80", "90", "100")


def test_every_kernel_compiles_for_a_generation_in_turn(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("ahead_of_time.py"), "--turns", *CAPABILITIES],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = [line.split(" sm_") for line in done.stdout.splitlines() if line.endswith(" bytes")]
    kernels = {name for name, _ in compiled}
    assert {"_decode", "_prefill", "_store", "_gemv", "_norm", "_rope", "_activate", "_pieces", "_rows"} <= kernels
    assert {rest.partition(":")[0] for _, rest in compiled} == set(CAPABILITIES)
