"""The tests of this folder import `fresh`, and share wheels that are built once."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path

import pytest

if (HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, HERE)

from fresh import CHECKOUT, Wheelhouse, build_wheel


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Wheelhouse:
    """Wheels of the SPI, the core, and the processor plugin without its kernels, of all the run's processes."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, said = base / "wheelhouse", base / "wheelhouse.txt"
    with (base / "wheelhouse.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            shutil.rmtree(folder, ignore_errors=True)
            for name in ("platforms", "core"):
                build_wheel(CHECKOUT / name, folder)
            cpu = base / "wheelhouse-cpu"
            ignored = shutil.ignore_patterns("build", "__pycache__")
            shutil.copytree(CHECKOUT / "plugins" / "cpu", cpu, ignore=ignored, dirs_exist_ok=True)
            # its kernels would take minutes and play no part
            said.write_text(build_wheel(cpu, folder, CC="/nowhere/cc", CXX="/nowhere/c++"), encoding="utf-8")
    return Wheelhouse(folder, said.read_text(encoding="utf-8"))
