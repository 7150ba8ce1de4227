"""Lets these tests import the modules that they share: scripted tokenizers, and engines without a model."""

from __future__ import annotations

import sys
from pathlib import Path

UNIT = Path(__file__).parent.parent
sys.path[:0] = [str(UNIT / folder) for folder in ("engine_loop", "frontend") if str(UNIT / folder) not in sys.path]
