"""Triton's kernels run here in its interpreter, on the host: chosen before any of them is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from typing import Any

from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parent))  # what the tests here share

_patch = interpreter._patch_lang_tensor


def _with_bounds_of_loops(tensor: Any, scope: Any) -> None:
    """Loops whose bounds are loaded: numpy 2.4 makes no integer of an array of one element any more."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_bounds_of_loops
