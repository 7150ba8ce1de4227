"""Lets the tests here import `kv_device`, which stands beside the scheduler tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))
