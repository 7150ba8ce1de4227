"""Tests of hardpoint-tpu on JAX's processor back end: no TPU, the same programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[2] / "plugins" / "tpu"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def several_chips() -> None:
    """Have JAX see the processor as four devices, where it has not looked yet."""
    with suppress(ImportError, RuntimeError):
        import jax

        jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(autouse=True)
def _on_the_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and JAX's processor back end, within these tests alone."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    several_chips()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def device() -> Iterator[Any]:
    """One opened device for every test that leaves it as it was."""
    pytest.importorskip("jax")
    from hardpoint_tpu.platform import TpuPlatform
    from tpu_bench import FAST

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        several_chips()
        opened = TpuPlatform().open(0, FAST)
    yield opened
    opened.close()
