"""Tests of the device `strict`: one thread, and their own module on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if (HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
